"""Diagnosis: whether and where a penalty can be differentiated again."""

from gradreg.diagnosis._first_check import first_check as first_check
