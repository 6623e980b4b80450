"""All mutants of the modules in which a mistake would be silent, and a random draw of them by a seed.

The mutants are those of cosmic-ray's operators. Three kinds are skipped: a mutant that does not compile, one whose code is that
of the original (annotations are never evaluated here), and one whose code is that of another mutant.
"""

from __future__ import annotations

import ast
import difflib
import json
import pickle
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

AREAS = {
    "sync": "sync/*.py",
    "data/order": "data/order.py",
    "data/batching": "data/batching.py",
    "guards": "dist/guards.py",
    "checkpoint/manifest": "checkpoint/manifest.py",
    "checkpoint/reader": "checkpoint/reader.py",
    "checkpoint/retention": "checkpoint/retention.py",
    "agent/verdict": "agent/root_cause.py",
    "lease": "run/lease.py",
    "stop": "stop/*.py",
    "world": "dist/world.py",
}
"""The files of each area, below src/rankwise."""


@dataclass(frozen=True)
class Mutant:
    """A change of a few lines of one file."""

    number: int
    area: str
    file: str
    """The path from the repository's root."""

    operator: str
    occurrence: int
    line: int
    """The first line that is replaced, counted from 1."""

    old: tuple[str, ...]
    new: tuple[str, ...]

    @classmethod
    def of(cls, record: Mapping[str, object]) -> Mutant:
        return cls(**{**record, "old": tuple(record["old"]), "new": tuple(record["new"])})  # type: ignore[arg-type]

    def applied(self, source: str) -> str:
        """The source with the mutant. Raises ValueError if the source is not the one from which the mutant was drawn."""
        lines = source.split("\n")
        begin, end = self.line - 1, self.line - 1 + len(self.old)
        if tuple(lines[begin:end]) != self.old:
            raise ValueError(f"{self.file}:{self.line} has changed since mutant {self.number} was drawn; type `run.py draw`")
        return "\n".join([*lines[:begin], *self.new, *lines[end:]])

    def describe(self) -> str:
        old, new = (" ".join(line.strip() for line in lines) for lines in (self.old, self.new))
        return f"{self.file}:{self.line} {old!r} -> {new!r}"


def write(path: Path, mutants: Sequence[Mutant]) -> None:
    path.write_text("".join(json.dumps(asdict(mutant)) + "\n" for mutant in mutants))


def read(path: Path) -> list[Mutant]:
    return [Mutant.of(json.loads(line)) for line in path.read_text().splitlines()]


def draw(root: Path, seed: int, count: int, least: int) -> tuple[list[Mutant], str]:
    """Draw `least` mutants of each area and the rest from all areas. Also returns how many mutants there were, in words."""
    lot: list[Mutant] = []
    left_out = {"do not compile": 0, "change no code": 0, "are the code of another": 0}
    for area, files in AREAS.items():
        for path in sorted(root.joinpath("src", "rankwise").glob(files)):
            lot += _mutants(path, area, root, left_out)
    chance = random.Random(seed)
    drawn: list[Mutant] = []
    for area in AREAS:
        drawn += chance.sample([mutant for mutant in lot if mutant.area == area], least)
    drawn += chance.sample([mutant for mutant in lot if mutant not in drawn], count - len(drawn))
    drawn.sort(key=lambda m: (list(AREAS).index(m.area), m.file, m.line, m.operator, m.occurrence))
    said = f"{len(lot)} mutants, besides " + ", ".join(f"{number} that {why}" for why, number in left_out.items())
    return [Mutant(**{**asdict(mutant), "number": number}) for number, mutant in enumerate(drawn, 1)], said


def _mutants(path: Path, area: str, root: Path, left_out: dict[str, int]) -> Iterator[Mutant]:
    source = path.read_text()
    lines = source.split("\n")
    seen = {_code(source)}
    for operator, occurrence, text in _texts(source):
        try:
            code = _code(text)
            with warnings.catch_warnings(action="ignore"):  # `is` with a literal
                compile(text, str(path), "exec", dont_inherit=True)
        except SyntaxError:
            left_out["do not compile"] += 1
            continue
        if code in seen:
            left_out["change no code" if code == _code(source) else "are the code of another"] += 1
            continue
        seen.add(code)
        changed = text.split("\n")
        hunks = [hunk for hunk in difflib.SequenceMatcher(None, lines, changed, False).get_opcodes() if hunk[0] != "equal"]
        begin, end, begin_new, end_new = hunks[0][1], hunks[-1][2], hunks[0][3], hunks[-1][4]
        file = str(path.relative_to(root))
        old, new = tuple(lines[begin:end]), tuple(changed[begin_new:end_new])
        yield Mutant(0, area, file, operator, occurrence, begin + 1, old, new)


def _texts(source: str) -> Iterator[tuple[str, int, str]]:
    """(operator, its occurrence, the mutated source) for all operators that need no arguments."""
    from cosmic_ray.ast import get_ast
    from cosmic_ray.mutating import MutationVisitor
    from cosmic_ray.plugins import get_operator, operator_names

    tree = pickle.dumps(get_ast(source))  # an operator changes its tree, and a copy is faster than to parse again
    for name in operator_names():
        if get_operator(name).arguments():
            continue
        occurrence = 0
        while True:
            visitor = MutationVisitor(occurrence, get_operator(name)())
            mutated = visitor.walk(pickle.loads(tree))
            if not visitor.mutation_applied:
                break
            yield name.removeprefix("core/"), occurrence, mutated.get_code()
            occurrence += 1


def _code(source: str) -> str:
    return ast.dump(_Evaluated().visit(ast.parse(source)))


class _Evaluated(ast.NodeTransformer):
    """Removes what is never evaluated under `from __future__ import annotations`."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = [ast.Pass()]
        return self.generic_visit(node)
