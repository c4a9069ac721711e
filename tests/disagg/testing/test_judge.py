"""What is written of a pair follows from what was observed of it."""

from __future__ import annotations

import pytest

from disagg.testing.judge import Observation, judge

ONE, OTHER = ((5, 6, 7), (8, 9)), ((5, 6, 7), (8, 4))
ALONE = {"alone_prefill": ONE, "alone_decode": ONE}
WRONG = {"tokens": OTHER, **ALONE}
TOKEN = "prompt 2, token 2 is 4, 9 of both single engines"
BYTE = "decode layer 3 k, token 17: 12, 34 on prefill"
UNSURE = {"alone_prefill": ONE, "alone_decode": OTHER}
APART = "the single engines differ from each other at prompt 2, token 2: 9 and 4"
NOTHING = "there are neither bytes nor tokens to compare"


def verdict(*runs):
    """Result and reason after runs, each fields of an Observation; None if another is needed."""
    judged = judge([Observation(**run) for run in runs])
    return None if judged is None else (judged.result, judged.reason)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ({"tokens": ONE, **ALONE}, ("serves", "tokens")),
        ({"tokens": ONE, "differences": "", **ALONE}, ("serves", "bytes")),
        ({"differences": ""}, ("serves", "bytes")),
        # bytes decide where they were read; tokens that differ are still said
        ({"differences": "", **WRONG}, ("serves", f"bytes, but {TOKEN}")),
        ({"differences": "", "tokens": OTHER, **UNSURE}, ("serves", "bytes")),
        # tokens judge only where both single engines agree
        ({"tokens": ONE, **UNSURE}, ("cannot be judged", APART)),
        ({"tokens": OTHER, **UNSURE}, ("cannot be judged", APART)),
        (
            {"tokens": ONE, "alone_prefill": ONE, "alone_decode": ((5, 6, 0), (1, 1))},
            ("cannot be judged", APART.replace("2, token 2: 9 and 4", "1, token 3: 7 and 0")),
        ),
        ({"tokens": ((1,), (2,)), "alone_prefill": ONE}, ("cannot be judged", NOTHING)),
        ({"alone_prefill": ONE, "alone_decode": ONE}, ("cannot be judged", NOTHING)),
        ({}, ("cannot be judged", NOTHING)),
        # only a package that is missing is "not here"
        ({"here": "lmcache is not installed"}, ("not here", "lmcache is not installed")),
    ],
)
def test_one_run_is_enough_for_an_answer_that_is_not_wrong(run, expected):
    assert verdict(run) == expected


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (WRONG, TOKEN),
        ({"differences": BYTE}, BYTE),
        ({"differences": BYTE, "tokens": ONE, **ALONE}, f"{BYTE}; tokens are right"),
        ({"differences": BYTE, **WRONG}, f"{BYTE}; {TOKEN}"),
        ({"differences": BYTE, "tokens": ONE, **UNSURE}, BYTE),
        # a prompt on which they agree judges, beside one on which they do not
        (
            {"tokens": ((5, 0, 7), (8, 9)), **UNSURE},
            "prompt 1, token 2 is 0, 6 of both single engines",
        ),
        (
            {"tokens": ((5, 6, 7), (8,)), **ALONE},
            "prompt 2, token 2 is none, 9 of both single engines",
        ),
        (
            {"tokens": ((5, 6, 7), ()), **ALONE},
            "prompt 2, token 1 is none, 8 of both single engines",
        ),
        # before a loss, a refusal, an error, and a package that is missing
        ({**WRONG, "lost": "decode ended"}, TOKEN),
        ({**WRONG, "refused": "no"}, TOKEN),
        ({**WRONG, "errors": ("prompt 1: 500",)}, TOKEN),
        ({"differences": BYTE, "lost": "decode", "refused": "no", "errors": ("x",)}, BYTE),
        ({**WRONG, "here": "no lmcache"}, TOKEN),
    ],
)
def test_a_wrong_answer_is_written_when_it_was_reproduced_twice(run, reason):
    assert verdict(run) is verdict(run, run) is None
    assert verdict(run, run, run) == ("WRONG", reason)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ({"refused": "block sizes 32 and 128"}, ("refuses", "block sizes 32 and 128")),
        ({"refused": "no", "here": "no lmcache"}, ("refuses", "no")),
        ({"refused": "no", "errors": ("prompt 1: 500",)}, ("refuses", "no")),
        # an engine that ended is named, and has refused nothing
        ({"lost": "prefill: Killed"}, ("lost", "prefill: Killed")),
        (
            {"lost": "decode: exit 1", "refused": "no", "tokens": ONE, **ALONE},
            ("lost", "decode: exit 1"),
        ),
        ({"lost": "decode: exit 1", "differences": ""}, ("lost", "decode: exit 1")),
        # a request that failed has no tokens, which are not wrong
        (
            {"errors": ("prompt 2: 500", "prompt 3"), "tokens": ((5, 6, 7), ()), **ALONE},
            ("fails", "prompt 2: 500"),
        ),
        (
            {"lost": "decode: exit 1", "tokens": ((5, 6, 7), ()), **ALONE},
            ("lost", "decode: exit 1"),
        ),
        ({"errors": ("prompt 2: 500",), "differences": ""}, ("fails", "prompt 2: 500")),
    ],
)
def test_what_was_not_served_is_tried_twice(run, expected):
    assert verdict(run) is None
    assert verdict(run, run) == expected


SERVED, REFUSED, LOST = {"tokens": ONE, **ALONE}, {"refused": "timed out"}, {"lost": "decode"}


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([REFUSED, SERVED], ("serves", "tokens; the first run refused: timed out")),
        ([LOST, SERVED], ("unsteady", "lost (decode); then serves (tokens)")),
        ([LOST, REFUSED], ("unsteady", "lost (decode); then refuses (timed out)")),
        ([REFUSED, WRONG], None),
        ([REFUSED, WRONG, WRONG], None),
        ([REFUSED, WRONG, WRONG, WRONG], ("WRONG", TOKEN)),
        ([WRONG, SERVED], None),
        ([WRONG, SERVED, SERVED], ("unsteady", f"WRONG in 1 of 3 runs: {TOKEN}")),
        ([WRONG, WRONG, LOST], ("unsteady", f"WRONG in 2 of 3 runs: {TOKEN}")),
        ([], None),
    ],
)
def test_runs_that_differ_do_not_serve_as_if_nothing_was(runs, expected):
    assert verdict(*runs) == expected


def test_a_verdict_counts_its_runs():
    judged = judge([Observation(**WRONG)] * 3)
    assert judged is not None and judged.runs == 3
    assert judged.words() == f"WRONG ({TOKEN})"


def test_answers_to_another_number_of_prompts_are_an_error():
    with pytest.raises(ValueError, match="zip"):
        judge([Observation(tokens=ONE[:1], alone_prefill=ONE, alone_decode=ONE)])
