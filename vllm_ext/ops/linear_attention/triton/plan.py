"""How a call's work is laid over the streaming multiprocessors: the planner's three tiers (HA-NPU paper, section 4).

Whole heads, a program each, when there are enough of them; heads split by columns of the state, which needs no
reduction; and, where sequences are long and heads few, segments of a sequence, which cost their transition matrices.
Times are in microseconds and only rank the choices: they were fitted to one H200 (docs/linear_attention.md).
"""

from __future__ import annotations

from dataclasses import dataclass

CHUNK = 64
HEAD, COLUMNS, SEGMENTS = "head", "columns", "segments"
_COLUMN_BLOCK = 64
_STEP = 1.0  # one chunk of one program, alone on its multiprocessor
_SHARED_STEP = 0.6  # the same for each of many programs on one multiprocessor
_TRANSITION_SHARE = 0.75  # a step without queries, of a step
_COMPOSE_STEP = 2.0
_COMPOSE_LAUNCH = 8.0
_LEAST_SEGMENT = 8
_LARGEST_TRANSITION = 128  # composing segments holds a K x K matrix in shared memory


@dataclass(frozen=True)
class Mapping:
    """tier HEAD, COLUMNS or SEGMENTS; block_columns of the state in one program; segment_chunks of 64 tokens in one
    segment, None for whole sequences.
    """

    tier: str
    block_columns: int
    segment_chunks: int | None


def map_prefill(
    num_tokens: int, num_sequences: int, value_heads: int, key_dim: int, value_dim: int, multiprocessors: int
) -> Mapping:
    """The mapping for num_tokens tokens of num_sequences sequences, taken to be of one length: the host cannot know.

    Raises ValueError on sizes that are not positive (no tokens are fine).
    """
    if min(num_sequences, value_heads, key_dim, value_dim, multiprocessors) < 1 or num_tokens < 0:
        raise ValueError(
            f"map_prefill: cannot map {num_tokens} tokens of {num_sequences} sequences, {value_heads} heads of "
            f"{key_dim} x {value_dim} on {multiprocessors} multiprocessors; sizes must be positive"
        )
    block = min(_COLUMN_BLOCK, value_dim)
    heads = num_sequences * value_heads
    tier = HEAD if block == value_dim else COLUMNS
    chunks = -(-num_tokens // (CHUNK * num_sequences))
    best, segment_chunks = _time(heads * value_dim // block, chunks, multiprocessors), None
    for segments in (2, 3, 4, 6, 8, 12, 16, 24, 32):
        length = -(-chunks // segments)
        if length < _LEAST_SEGMENT or key_dim > _LARGEST_TRANSITION:
            break
        transition = heads * (value_dim + key_dim) // block * (segments - 1)
        time = (
            _TRANSITION_SHARE * _time(transition, length, multiprocessors)
            + _COMPOSE_LAUNCH
            + _COMPOSE_STEP * segments
            + _time(heads * value_dim // block * segments, length, multiprocessors)
        )
        if time < best:
            best, segment_chunks = time, length
    return Mapping(SEGMENTS if segment_chunks else tier, block, segment_chunks)


def _time(programs: int, chunks: int, multiprocessors: int) -> float:
    return chunks * max(_STEP, _SHARED_STEP * -(-programs // multiprocessors))
