"""Compare the exact bits and bytes of short training runs between two versions of this code.

    python tools/bit_exact.py record build/reference.json      # in the old version
    python tools/bit_exact.py compare build/reference.json     # in the new one, on the same machine

The tiny recipe trains 20 steps on generated text under ten plans that cover every strand. Recorded are each
step's loss and gradient norm, the validation losses, the SHA-256 of the exported weights and the collectives
of one step (verb, axes, channel, calls, bytes) of every class of ranks. `compare` prints what differs and
exits 1. Bits depend on the processor and the torch build, so a reference is valid only on the machine that
recorded it. PYTHONPATH chooses the version: `PYTHONPATH=other/src python tools/bit_exact.py record ...`.
"""

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PLANS = (
    "dp=1 micro=2",
    "dp=2",
    "dp=2 zero=1 precision=bf16",
    "dp=2 zero=2 reduce=bf16 micro=2 recompute=full",
    "dp=2 zero=3 precision=bf16 recompute=selective",
    "dp=4 zero=3 shard=2 algorithm=ring",
    "tp=2 sp=true",
    "tp=2x2 dp=1 recompute=full",
    "pp=2 schedule=zb-h1 micro=4",
    "pp=2 dp=2 tp=2 zero=1 micro=2 precision=bf16",
)
STEPS = 20
RECIPE = Path(__file__).resolve().parent.parent / "recipes/tiny.toml"
MEASURED = ("loss", "grad_norm", "validation_loss")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("reference", type=Path)
    parser.add_argument("--plans", nargs="*", default=PLANS, help="instead of the ten")
    args = parser.parse_args()
    runs = {}
    with tempfile.TemporaryDirectory(prefix="plait-bits-") as folder:
        write_texts(Path(folder) / "texts")
        for plan in args.plans:
            print(plan, flush=True)
            runs[plan] = run(plan, Path(folder))
    if args.command == "record":
        args.reference.parent.mkdir(parents=True, exist_ok=True)
        args.reference.write_text(json.dumps(runs, indent=1))
        return 0
    reference = json.loads(args.reference.read_text())
    found = [line for plan in args.plans for line in differences(plan, reference[plan], runs[plan])]
    print("\n".join(found) or f"{len(runs)} plans: the same bits and the same bytes")
    return 1 if found else 0


def write_texts(folder: Path) -> None:
    """Write the same pseudo-random words in every version of the code and of Python's libraries."""
    folder.mkdir()
    source = random.Random(0)
    words = ["".join(source.choices("etaoinshrdlu", k=source.randint(1, 9))) for _ in range(500)]
    for number in range(40):
        text = "\n\n".join(" ".join(source.choices(words, k=12)) for _ in range(500))
        (folder / f"{number:02}.txt").write_text(text)


def run(plan: str, folder: Path) -> dict[str, Any]:
    """Train under `plan`, and return the numbers, the hash of the weights and the traffic of a step."""
    directory = folder / plan.replace(" ", "-")
    settings = {
        "run.dir": str(directory),
        "run.steps": STEPS,
        "run.batch": 8,
        "run.evaluate_every": 10,
        "run.checkpoint_every": 0,
        "model.config.attention_dropout": 0.0,
        "data.dir": str(folder / "data"),
        "data.sources": [str(folder / "texts/*.txt")],
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    command = [sys.executable, "-m", "plait", "train", str(RECIPE), "--plan", plan, *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    measured = json.loads((directory / "measured.json").read_text())
    return {
        "metrics": [{key: line[key] for key in ("step", *MEASURED) if key in line} for line in lines],
        "weights": hashlib.sha256((directory / "export/model.safetensors").read_bytes()).hexdigest(),
        "traffic": [{key: ranks[key] for key in ("ranks", "traffic")} for ranks in measured["alike"]],
    }


def differences(plan: str, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """A line for each of the three records that differs, with the first place."""
    found = []
    for key, before in old.items():
        after = new[key]
        if before == after:
            continue
        pairs = zip(before, after, strict=False) if isinstance(before, list) else [(before, after)]
        first = next(((a, b) for a, b in pairs if a != b), (len(before), len(after)))
        found.append(f"{plan}: {key} differ, first {first[0]} then {first[1]}")
    return found


if __name__ == "__main__":
    sys.exit(main())
