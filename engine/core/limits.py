"""What one engine has, how much of it one step may use, and whether a model can live with that."""

from __future__ import annotations

from dataclasses import dataclass

from engine.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Limits:
    """What one engine has, and how much of it one step may use."""

    max_streams: int
    cache_embeds: int
    group_pages: tuple[int, ...] = ()
    step_positions: int = 1024
    step_embeds: int = 1024


def largest_item(spec: ModelSpec, limits: Limits) -> int:
    """Embeddings of the largest item that always fits into what is set aside for a stream and into one step.

    Raises ValueError if a model could never run within these limits.
    """
    if len(limits.group_pages) != len(spec.kv_groups):
        raise ValueError(f"{len(spec.kv_groups)} groups of pages are needed, {len(limits.group_pages)} were given")
    needed = spec.window_for(live=False) if spec.rereads_window else 1
    if limits.step_positions < needed:
        raise ValueError(f"a step of this model reads {needed} positions; raise step_positions to at least that")
    if limits.step_embeds < 1:
        raise ValueError("a step must be able to encode something; raise step_embeds")
    if not spec.rereads_window:
        return min(spec.embeds_per_stream, limits.step_embeds)
    slack = spec.embeds_per_stream - spec.window_positions
    if slack < 0:
        raise ValueError(f"embeds_per_stream must be at least the window of {spec.window_positions} positions")
    # An item may stick out of the window at both ends.
    return min(slack // 2 + 1, limits.step_embeds)
