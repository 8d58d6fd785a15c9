"""What each attack costs: bytes sent, memory of both processes, the longest hold of the gateway's event loop, and how
long others wait for their words.

    python -m tests.attacks.measure [--source CHECKOUT] [NAME...]

Every attack has a good session of its own beside it. `--source` runs the server of another checkout, which is how the
figures "before" in docs/security.md were made.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path

from tests.attacks import good_client
from tests.attacks.all_attacks import ATTACKS
from tests.attacks.conftest import letters
from tests.attacks.real_server import (
    GOOD_KEY,
    WITHOUT_KEYS,
    RealServer,
    peak_growth,
    real_server,
    watched_memory,
)
from tests.attacks.target import Attack, Target

MIB = 2**20


async def measure(server: RealServer, attack: Attack, calm: good_client.Lap) -> str:
    target = Target(server.port)
    audio = good_client.speech()
    began_at = time.time()
    with watched_memory(server) as seen:
        lap = asyncio.create_task(good_client.one_lap(server.ws, GOOD_KEY, audio))
        await asyncio.sleep(1.0)
        began = time.perf_counter()
        try:
            await asyncio.wait_for(attack.run(target), 100)
            outcome = "told off"
        except Exception as error:
            outcome = f"{type(error).__name__}: {str(error).splitlines()[0][:90] if str(error) else ''}"
        took = time.perf_counter() - began
        try:
            spoken = await lap
            later = statistics.median(spoken.delays) - statistics.median(calm.delays)
            same = letters(spoken) == letters(calm) and not spoken.problems
            others = f"{'same words' if same else 'OTHER WORDS'}, {later:+.2f} s"
        except Exception as error:
            others = f"LOST: {type(error).__name__}"
    growth = peak_growth(seen)
    held = server.longest_hold(began_at)
    restarted = "" if server.engine_is_the_same() else "; THE ENGINE WAS RESTARTED"
    return (
        f"| {attack.name} | {target.sent:,} B in {took:.1f} s | gateway {growth.gateway / MIB:+.0f} MiB, "
        f"engine {growth.engine / MIB:+.0f} MiB | {held} | {others}{restarted} | {outcome} |"
    )


async def run(names: list[str], source: Path | None) -> None:
    calm = None
    for name in names or list(ATTACKS):
        # A server of its own for each: what one attack broke must not be counted for the next.
        with real_server(source, WITHOUT_KEYS if ATTACKS[name].few_sessions else None) as server:
            calm = calm or await good_client.one_lap(server.ws, GOOD_KEY, good_client.speech())
            sys.stdout.write(await measure(server, ATTACKS[name], calm) + "\n")
            sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="the checkout whose server is attacked")
    parser.add_argument("names", nargs="*", choices=[*ATTACKS, []], help="attacks; all of them if none is named")
    options = parser.parse_args()
    asyncio.run(run(options.names, options.source))


if __name__ == "__main__":
    main()
