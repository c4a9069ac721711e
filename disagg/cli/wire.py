"""How long a hand-off takes on the wire, and how many runs a second that supposes."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.contract.hand_off import HandOff, Traffic


@dataclass(frozen=True, slots=True)
class LinkRates:
    """What each rank's link does in a second: bytes, and runs. None where it is not said."""

    bytes_per_second: float | None = None
    runs_per_second: float | None = None

    def byte_seconds(self, nbytes: int) -> float | None:
        """How long bytes take at least: without any overhead."""
        return None if self.bytes_per_second is None else nbytes / self.bytes_per_second

    def run_seconds(self, runs: int) -> float | None:
        return None if self.runs_per_second is None else runs / self.runs_per_second


@dataclass(frozen=True, slots=True)
class Busiest:
    """The traffic of the rank with the most runs, and the most bytes of a rank."""

    traffic: Traffic
    nbytes: int

    @classmethod
    def of(cls, hand_off: HandOff) -> Busiest:
        ranks = [*hand_off.received_runs().values(), *hand_off.sent_runs().values()]
        most = max(ranks, key=lambda traffic: traffic.runs)
        return cls(most, max(traffic.nbytes for traffic in ranks))

    def supposed_rate(self, link: LinkRates) -> float | None:
        """Runs a second that the time of the bytes supposes."""
        seconds = link.byte_seconds(self.nbytes)
        return self.traffic.runs / seconds if seconds else None


def wire_words(hand_off: HandOff, link: LinkRates) -> list[str]:
    """Sentences of how long the busiest ranks' links take; none of a link of which nothing is
    said.
    """
    if link == LinkRates():
        return []
    busiest, sentences = Busiest.of(hand_off), list[str]()
    runs = f"{busiest.traffic.runs:,} runs"
    seconds, rate = link.byte_seconds(busiest.nbytes), busiest.supposed_rate(link)
    if seconds is not None and link.bytes_per_second is not None:
        took = f"at least {milliseconds(seconds)} ms at {8e-9 * link.bytes_per_second:,g} Gb/s"
        sentences.append(f"on the wire: {took} a rank; at most {_most(hand_off)}.")
    if rate is not None:
        sentences.append(
            f"That supposes {_count(rate)} runs a second on a link: {runs} of "
            f"{busiest.traffic.mean:,.0f} bytes, if no two pages are adjacent."
        )
    run_seconds = link.run_seconds(busiest.traffic.runs)
    if run_seconds is not None and link.runs_per_second is not None:
        sentences.append(
            f"At {_count(link.runs_per_second)} runs a second {runs} take "
            f"{milliseconds(run_seconds)} ms, if no two pages are adjacent."
        )
    return sentences


def milliseconds(seconds: float) -> str:
    number = 1e3 * seconds
    return f"{number:,.4g}" if number < 1e4 else f"{number:,.0f}"


def _count(number: float) -> str:
    return f"{number / 1e6:,.4g} million" if number >= 1e6 else f"{number:,.0f}"


def _most(hand_off: HandOff) -> str:
    """The most bytes of a rank of either side."""
    sides = (
        (hand_off.decode, "received by", hand_off.received()),
        (hand_off.prefill, "sent by", hand_off.sent()),
    )
    words = []
    for side, verb, moved in sides:
        number = max(moved, key=lambda n: moved[n])
        words.append(f"{moved[number]:,} bytes are {verb} {side.words([number])}")
    return ", ".join(words)
