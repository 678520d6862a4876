"""What was checked and what was found."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CheckFailure", "Finding", "RegularizerReport"]

_MARKS = {"passed": "ok", "failed": "FAILED", "skipped": "skipped", "not applicable": "-"}


class PropertyError(AssertionError):
    """A property does not hold; the message says by how much, where, and what it usually means."""


class NotApplicable(Exception):  # noqa: N818  # no fault: a property that has no meaning here
    """A property has no meaning for this regularizer, model or batch; the message says why."""


@dataclass(frozen=True)
class Finding:
    """One property.

    Attributes:
        name: Of the property, one of `REGULARIZER_PROPERTIES`.
        status: `"passed"`, `"failed"`, `"skipped"` (asked for) or `"not applicable"`.
        detail: What was measured, what is wrong, or why it was left out.
    """

    name: str
    status: str
    detail: str


@dataclass(frozen=True)
class RegularizerReport:
    """The properties of a regularizer on one model and batch; `str(report)` is a table.

    Attributes:
        regularizer: Its name.
        findings: One per property, in the order in which they were looked at.
        notes: Warnings that the first call gave.
    """

    regularizer: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The properties that do not hold."""
        return tuple(finding for finding in self.findings if finding.status == "failed")

    def __getitem__(self, name: str) -> Finding:
        """Return the finding of a property."""
        return {finding.name: finding for finding in self.findings}[name]

    def __str__(self) -> str:
        """Lay the findings out as a table, failures in full."""
        held = sum(finding.status == "passed" for finding in self.findings)
        lines = [f"{self.regularizer}: {held} properties hold, {len(self.failures)} do not"]
        width = max((len(finding.name) for finding in self.findings), default=0)
        for finding in self.findings:
            first, *more = finding.detail.splitlines() or [""]
            lines.append(f"  {finding.name:<{width}}  {_MARKS[finding.status]:<7}  {first}".rstrip())
            lines += [f"  {'':<{width}}  {'':<7}  {line}" for line in more]
        return "\n".join([*lines, *(f"  warned: {note}" for note in self.notes)])


class CheckFailure(AssertionError):  # noqa: N818  # what failed is the thing checked, as with AssertionError
    """Properties of a regularizer do not hold; `report` holds all findings."""

    def __init__(self, report: RegularizerReport) -> None:
        names = ", ".join(finding.name for finding in report.failures)
        super().__init__(f"{names} failed.\n{report}")
        self.report = report
