"""How a call's work is laid over the streaming multiprocessors: the planner's three tiers (HA-NPU paper, section 4).

Whole heads, a program each, when there are enough of them; heads split by columns of the state, which needs no
reduction; and, where sequences are long and heads few, segments of a sequence, which cost their transition matrices.
Times are in microseconds and only rank the choices: they were fitted to one H200 (docs/linear_attention.md).
"""

from __future__ import annotations

from dataclasses import dataclass

CHUNK = 64
HEAD, COLUMNS, SEGMENTS = "head", "columns", "segments"
# One chunk of one program, which has a multiprocessor to itself, by columns of the state that it carries.
_STEPS = {64: 1.2, 128: 1.8}
# The same without queries, of one and of two programs on a multiprocessor.
_TRANSITION_STEPS = {"gdn": (0.8, 1.1), "kda": (1.3, 2.6)}
_COMPOSE_STEP = 3.0
_COMPOSE_LAUNCH = 8.0
_SECOND_LAUNCH = 8.0
_LEAST_GAIN = 1.1  # segments cost memory as well, and the model is rough
_LEAST_SEGMENT = 16
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
    num_tokens: int,
    num_sequences: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    multiprocessors: int,
    widest_block: int = 64,
    op: str = "gdn",
    overlapping: bool = True,
) -> Mapping:
    """The mapping for num_tokens tokens of num_sequences sequences, taken to be of one length: the host cannot know.

    widest_block: columns of the state that a program can carry, 64 or 128; op: "gdn" or "kda"; overlapping: whether
    first segments can run beside their transitions. Raises ValueError on sizes that are not positive (no tokens are
    fine).
    """
    if min(num_sequences, value_heads, key_dim, value_dim, multiprocessors) < 1 or num_tokens < 0:
        raise ValueError(
            f"map_prefill: cannot map {num_tokens} tokens of {num_sequences} sequences, {value_heads} heads of "
            f"{key_dim} x {value_dim} on {multiprocessors} multiprocessors; sizes must be positive"
        )
    heads = num_sequences * value_heads
    chunks = -(-num_tokens // (CHUNK * num_sequences))
    narrow = min(min(_STEPS), value_dim)
    blocks = {narrow} | {block for block in _STEPS if block <= widest_block and value_dim % block == 0}

    def whole(block: int, segments: int, length: int) -> float:
        programs = heads * value_dim // block * segments
        return _rounds(programs, multiprocessors) * length * _STEPS.get(block, _STEPS[min(_STEPS)])

    block = min(sorted(blocks), key=lambda each: whole(each, 1, chunks))
    best, segment_chunks = whole(block, 1, chunks) / _LEAST_GAIN, None
    # Other sequences' second segments would keep first ones waiting, and KDA's programs wait for memory as it is.
    overlapping = overlapping and num_sequences == 1 and op == "gdn"
    alone, together = _TRANSITION_STEPS[op]
    step = _STEPS[min(_STEPS)]
    for segments in (2, 3, 4, 6, 8, 12, 16, 24, 32):
        length = -(-chunks // segments)
        if length < _LEAST_SEGMENT or key_dim > _LARGEST_TRANSITION:
            break
        # The first segment's transition is of its initial state alone.
        transitions = heads * (value_dim * (segments - 1) + key_dim * (segments - 2)) // narrow
        if segments == 2 and overlapping and 2 * transitions <= multiprocessors:
            # The first segment is carried beside its transition, and ends with the second, which begins after it.
            length = round(chunks * step / (2 * step - alone))
            time = step * length + _SECOND_LAUNCH
        else:
            rounds = _rounds(transitions, multiprocessors)
            time = (alone if rounds == 1 else together * -(-rounds // 2)) * length
            time += _COMPOSE_LAUNCH + _COMPOSE_STEP * segments + whole(narrow, segments, length)
        if time < best:
            best, segment_chunks = time, length
    if segment_chunks:
        return Mapping(SEGMENTS, narrow, segment_chunks)
    return Mapping(HEAD if block == value_dim else COLUMNS, block, None)


def _rounds(programs: int, multiprocessors: int) -> int:
    return -(-programs // multiprocessors)
