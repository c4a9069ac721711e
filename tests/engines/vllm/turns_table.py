"""`python -m tests.engines.vllm.turns_table`: how many tokens prefill computes in each turn of a
conversation, with kvpool's store and with vLLM's own NixlConnector.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.engines.process import EngineFailed
from tests.engines.vllm.engines import Engine
from tests.engines.vllm.models import save
from tests.engines.vllm.turns import CASES, Connector, Conversation, answers_alone


def table_row(name: str, connector: Connector, folder: Path, right: list[list[int]]) -> str:
    """Of the table: what prefill has computed, and which tokens came."""
    with ExitStack() as stack:

        def start(role: Any, model: str, **options: Any) -> Engine:
            path = save(model, folder / "models")
            return stack.enter_context(Engine(role, path, folder / "logs", **options))

        place = Path(tempfile.mkdtemp(dir=folder))
        conversation = Conversation(CASES[name], start, place, connector)
        try:
            turns = conversation.turns()
        except EngineFailed as error:
            lines = [line for line in str(error).splitlines() if "Error" in line]
            return f"ends with {lines[-1:] or str(error).splitlines()[:1]}"
        blocks, _ = conversation.decode.busy() or (0, 0)
    answered = (token for turn in turns for token in turn.answer)
    equal = sum(here == there for here, there in zip(answered, (t for a in right for t in a)))
    computed = " | ".join(str(turn.computed) for turn in turns)
    return f"{computed} | {equal} of {sum(map(len, right))} | {blocks}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--connectors", nargs="+", default=["kvpool", "NixlConnector"])
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvpool-turns-"))
    print("| case | connector | turn 1 | 2 | 3 | tokens as one engine's | blocks held by decode |")
    for name in given.cases:
        case = CASES[name]
        path = save(case.model, folder / "models")
        with Engine("single", path, folder / "logs", **case.alone) as single:
            right = answers_alone(single.ready(), case)
        for connector in given.connectors:
            row = table_row(name, connector, folder, right)
            print(f"| {name} | {connector} | {row} |", flush=True)


if __name__ == "__main__":
    main()
