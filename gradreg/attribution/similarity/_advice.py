"""What to make of the numbers."""

from __future__ import annotations

from gradreg.attribution.similarity._calibration import AS_GIVEN, NO_END, NO_SPECIAL, Calibration
from gradreg.attribution.similarity._findings import Findings
from gradreg.attribution.similarity._what_ifs import NEW, NO_EMBEDDINGS, NO_NORMS, PREFIX, PROMPT, UNIT

_SMALL = 0.05  # changes of a cosine that are not worth a sentence

# what to do where a change raises the cosine, and where it lowers it
_ADVICE = {
    NO_END: (
        "The end token is predicted in other contexts and pulls them apart; leave it out of the loss to compare content",
        "Much of the similarity is that both end; leave the end token out of the loss to compare content",
    ),
    NO_SPECIAL: (
        "Special tokens pull them apart; leave them out of the loss to compare content",
        "Much of the similarity is special tokens; leave them out of the loss to compare content",
    ),
    NEW: (
        "The tokens that only one example has pull them apart",
        "The tokens that only one example has are like those of the other",
    ),
    PROMPT: (
        "The prompts differ more than the answers; mask them (labels of -100) to compare answers",
        "Much of the similarity is the prompt; mask it (labels of -100) to compare answers",
    ),
    UNIT: (
        "A few tokens with large gradients pull them apart; look at their shares",
        "A few tokens with large gradients make them alike; look at their shares",
    ),
    NO_EMBEDDINGS: (
        "Embeddings and LM head, which see the very words, pull them apart; compare without them (params=)",
        "Much of the similarity is in embeddings and LM head, which see the very words; compare without them (params=)",
    ),
    NO_NORMS: (
        "Normalization layers pull them apart; compare without them (params=)",
        "Much of the similarity is in normalization layers, which are few numbers; compare without them (params=)",
    ),
}


def reduction(report: Findings) -> str:
    counts = len(report.tokens_a), len(report.tokens_b)
    if counts == (1, 1):
        return "One target each: sum and mean are the same."
    mean = report.dot / (counts[0] * counts[1])
    return (
        f"Sum or mean over tokens: cosine, shares and what-ifs are the same. The dot product is {report.dot:.4g} for sums and "
        f"{mean:.4g} for means (divided by {counts[0]} x {counts[1]} tokens), which favors short examples."
    )


def recommendation(report: Findings) -> str:
    sentences = [_cause(report), _standing(report)]
    return " ".join(sentence for sentence in sentences if sentence)


def _cause(report: Findings) -> str:
    own = report.cosine
    changes = {
        name: found.cosine - own
        for name, found in report.what_ifs.items()
        if name in _ADVICE and found.cosine is not None
    }
    strongest = max(changes, key=lambda name: abs(changes[name]), default=None)
    if strongest is None or abs(changes[strongest]) < _SMALL:
        return f"The cosine of {own:.3f} is stable: no change of tokens or groups moves it by {_SMALL} or more."
    change = changes[strongest]
    text = f"The cosine moves most {_phrase(strongest)}: {own:.3f} to {own + change:.3f}. {_ADVICE[strongest][change < 0]}."
    prefix = report.what_ifs.get(PREFIX)
    if prefix is not None and prefix.cosine is not None and prefix.cosine > 1 - 1e-3:
        text += " The shared prefix has the same gradients: all difference comes from the tokens behind it."
    return text


def _phrase(name: str) -> str:
    return {UNIT: "with unit-normalized tokens", PROMPT: "with the prompt masked"}.get(name, name)


def _standing(report: Findings) -> str:
    calibration = report.calibration
    if calibration is None:
        return "A cosine means little alone: give calibration= other examples."
    percentile = calibration.percentile[AS_GIVEN]
    if percentile != percentile:
        return ""
    text = f"The cosine is higher than {percentile:.0f} % of the other pairs, and b is {_place(calibration, AS_GIVEN)}"
    other = next((key for key in (NO_END, NO_SPECIAL) if key in calibration.percentile), None)
    if other is not None and calibration.rank[other] and calibration.rank[other] != calibration.rank[AS_GIVEN]:
        text += f"; {other} it is {_place(calibration, other)}"
    return text + "."


def _place(calibration: Calibration, key: str) -> str:
    rank, count = calibration.rank[key], calibration.count + 1
    return f"number {rank} of {count} by cosine with a"
