"""What is read from a script's text before anything starts."""

from __future__ import annotations

import ast
import os
import warnings
from pathlib import Path

import pytest

from rankwise.errors import ConfigError
from rankwise.launch.script_lint import asks_for_nccl, examine, pitfalls


def keep_cold(source: str) -> str | None:
    Path("train.py").write_text(source)
    return examine("train.py").keep_cold


def test_a_script_that_is_not_there_is_an_error_that_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        examine("trian.py")
    assert str(caught.value) == f"there is no script trian.py (in {tmp_path})"
    Path("train.py").touch()
    with pytest.raises(ConfigError, match=r"; did you mean train\.py\?$"):
        examine("trian.py")
    with pytest.raises(ConfigError, match=r"no script no\.py \(in .*\)$"):  # only the ending of train.py is alike
        examine("no.py")


@pytest.mark.parametrize("typed", ["folder", "folder/"])
def test_a_folder_is_an_error_that_says_what_to_give(typed: str) -> None:
    Path("folder").mkdir()
    with pytest.raises(ConfigError) as caught:
        examine(typed)
    assert str(caught.value) == f"{typed} is a folder; give the script that trains, for example folder/train.py"


def test_a_syntax_error_is_shown_with_its_place() -> None:
    Path("train.py").write_text("import os\n\ndef f(:\n    pass\n")
    with pytest.raises(ConfigError) as caught:
        examine("train.py")
    assert str(caught.value) == "train.py:3: syntax error: invalid syntax\n    def f(:\n          ^"


def test_a_syntax_error_in_an_indented_or_endless_line_stays_short() -> None:
    Path("train.py").write_text("if True:\n        x = = 1\n")
    with pytest.raises(ConfigError) as caught:
        examine("train.py")
    assert str(caught.value).splitlines()[1:] == ["    x = = 1", "        ^"]
    Path("train.py").write_text(f"x = = '{'x' * 500}'\n")
    with pytest.raises(ConfigError) as caught:
        examine("train.py")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", [b"a = 1\nb = \0\n", b"# coding: no-such\n", b'a = "\xff"\n'])
def test_bytes_that_are_no_source_are_one_line_of_error(source: bytes) -> None:
    Path("train.py").write_bytes(source)
    with pytest.raises(ConfigError, match=r"\Atrain\.py.*: syntax error: .*(\n    .*\n +\^)?\Z"):
        examine("train.py")


@pytest.mark.parametrize("typed", ["pipe", "/dev/null", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"])
def test_what_only_one_process_can_read_is_refused_because_other_ranks_would_run_an_empty_script(typed: str) -> None:
    """`rankwise run /dev/stdin < train.py`: the standard input of ranks other than 0 is empty."""
    os.mkfifo("pipe")
    with pytest.raises(ConfigError, match=f"^{typed} is not a file that each rank can read; write the script to a file"):
        examine(typed)


def test_an_empty_script_and_one_in_another_encoding_can_run() -> None:
    Path("train.py").write_bytes(b"")
    assert examine("train.py").keep_cold is None
    Path("train.py").write_bytes("# coding: latin-1\ntext = 'größe'\n".encode("latin-1"))
    assert examine("train.py").keep_cold is None


def test_nothing_of_the_script_is_run_and_its_warnings_are_left_to_python() -> None:
    source = "import sys\nsys.modules['ran'] = sys\ntext = '\\d'\nassert (1, 'always true')\n"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert keep_cold(source) is None
    assert "ran" not in __import__("sys").modules


WRITES = [
    "os.environ['A'] = '1'",
    "os.environ['A'] += ':x'",
    "x = os.environ['A'] = '1'",
    "del os.environ['A']",
    "os.environ.setdefault('A', '1')",
    "os.environ.update(A='1')",
    "os.environ.pop('A', None)",
    "os.environ.clear()",
    "os.putenv('A', '1')",
    "from os import environ; environ['A'] = '1'",
    "if True:\n    os.environ['A'] = '1'",
    "if not True:\n    pass\nelse:\n    os.environ['A'] = '1'",
    "try:\n    os.environ['A'] = '1'\nfinally:\n    pass",
    "for name in 'AB':\n    os.environ[name] = '1'",
    "with open(os.devnull):\n    os.environ['A'] = '1'",
    "print(os.environ.setdefault('A', '1'))",
]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("load", ["import torch", "from torch import nn", "import torch.nn as nn", "import numpy, torch"])
def test_a_write_to_the_environment_before_torch_is_imported_keeps_the_ranks_cold(write: str, load: str) -> None:
    line = 2 + next(number for number, text in enumerate(write.split("\n")) if "environ" in text or "putenv" in text)
    said = f"line {line} sets environment variables before torch is imported"
    assert keep_cold(f"import os\n{write}\n{load}\n") == said


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("load", ["import torch", "from torch import nn", "import torch.nn as nn", "import numpy, torch"])
def test_a_write_after_torch_is_imported_is_fine(write: str, load: str) -> None:
    assert keep_cold(f"import os\n{load}\n{write}\n") is None


def test_a_write_in_a_script_that_never_imports_torch_by_itself_keeps_the_ranks_cold() -> None:
    """What the script imports may import torch."""
    assert keep_cold("import os\nos.environ['A'] = '1'\nimport speechbrain\n") is not None


def test_a_name_that_only_begins_like_torch_is_not_torch() -> None:
    assert keep_cold("import os, torchless\nfrom torch_like import x\nfrom . import torch\nos.environ['A'] = '1'\n") is not None


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    os.environ['A'] = '1'",
        "async def f():\n    os.environ['A'] = '1'",
        "class C:\n    def f(self):\n        os.environ['A'] = '1'",
        "x = os.environ['A']",
        "x = os.environ.get('A', '1')",
        "x = dict(os.environ)",
        "x = {**os.environ}\nx['A'] = '1'\nx.update(B='2')",
        "environment = {}\nenvironment['A'] = '1'",
    ],
)
def test_a_write_inside_a_function_and_a_read_are_fine(source: str) -> None:
    assert keep_cold(f"import os\n{source}\nimport torch\n") is None


@pytest.mark.parametrize("source", [b"a = \0\n", b"# coding: no-such\n"])
def test_an_error_without_a_line_names_none(source: bytes) -> None:
    Path("train.py").write_bytes(source)
    with pytest.raises(ConfigError, match=r"\Atrain\.py: syntax error: "):
        examine("train.py")


@pytest.mark.parametrize(
    "write",
    [
        "os.environ |= {'A': '1'}", "os.environ['A'], b = '1', 2", "os.environ['A']: str = '1'", "os.unsetenv('A')",
        "os.environ.popitem()", "os.environb[b'A'] = b'1'", "class C:\n    os.environ['A'] = '1'",
    ],
)  # fmt: skip
def test_these_writes_are_seen_too(write: str) -> None:
    Path("train.py").write_text(f"import os\n{write}\nimport torch\n")
    assert examine("train.py").keep_cold is not None


@pytest.mark.parametrize(
    "write",
    [
        "if True:\n    def f():\n        os.environ['A'] = '1'", "f = lambda: os.environ.update(A='1')",
        "try:\n    import torch\nexcept ImportError:\n    raise\nos.environ['A'] = '1'",
    ],
)  # fmt: skip
def test_these_need_no_cold_start(write: str) -> None:
    Path("train.py").write_text(f"import os\n{write}\nimport torch\n")
    assert examine("train.py").keep_cold is None


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("import os\nimport torch.nn as nn", 2),
        ("from torch import nn", 1),
        ("try:\n    import torch\nexcept ImportError:\n    torch = None", None),
        ("def main():\n    import torch", None),
        ("import torchish\nfrom .torch import nn", None),
    ],
)
def test_an_import_of_torch_that_is_certain_to_run_is_known_by_its_line(source: str, line: int | None) -> None:
    Path("train.py").write_text(source)
    assert examine("train.py").torch_line == line


# --- lines from another launcher's manual

SPAWNS = """
import torch.multiprocessing as mp
def train(rank, world_size): ...
if __name__ == "__main__":
    mp.spawn(train, args=(4,), nprocs=4)
"""
PROCID = "import os\nlocal_rank = int(os.environ['SLURM_PROCID'])\nprint(os.environ['SLURM_PROCID'])\n"
ARGUMENT = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--local_rank', type=int)\n"
USED = "args = parser.parse_args()\ntorch.cuda.set_device(args.local_rank)\n"


def found(source: str) -> list[str]:
    return pitfalls(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        SPAWNS,
        SPAWNS.replace("mp.spawn", "torch.multiprocessing.spawn"),
        SPAWNS.replace("import torch.multiprocessing as mp", "from torch.multiprocessing import spawn as s")
        .replace("mp.spawn", "s"),
        SPAWNS + "import rankwise\n",
    ],
)  # fmt: skip
def test_a_script_that_starts_processes_itself_is_told_with_its_line(source: str) -> None:
    (text,) = found(source)
    assert text.startswith(
        "line 5 starts processes itself (torch.multiprocessing.spawn), and each rank would start them again: use python"
    )


@pytest.mark.parametrize(
    "name", ["SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK"]
)
def test_a_rank_that_is_read_from_another_starters_variable_is_told_with_its_first_line(name: str) -> None:
    (text,) = found(PROCID.replace("SLURM_PROCID", name))
    assert text == f"line 2 reads a rank from {name}: rankwise sets RANK, and LOCAL_RANK for the rank within its node"


@pytest.mark.parametrize(
    "source",
    [
        ARGUMENT + USED,
        ARGUMENT + "local_rank = vars(parser.parse_args())['local_rank']\n",
        ARGUMENT.replace("type=int", "dest='gpu'") + USED.replace("local_rank", "gpu"),
    ],
)
def test_a_local_rank_that_is_an_argument_is_told_with_what_to_read(source: str) -> None:
    (text,) = found(source)
    assert text == 'line 3 expects --local_rank, which rankwise does not pass: read int(os.environ["LOCAL_RANK"])'


def test_a_local_rank_that_the_script_accepts_and_does_not_use_is_passed_over() -> None:
    """timm, DINO and MAE accept the option for older launchers, and read LOCAL_RANK in another file."""
    assert found(ARGUMENT + "args = parser.parse_args()\nutils.init_distributed_mode(args)\n") == []


@pytest.mark.parametrize("source", [PROCID + ARGUMENT + USED, ARGUMENT + USED, SPAWNS + PROCID])
def test_a_script_that_also_reads_torchruns_variables_knows_what_it_does(source: str) -> None:
    assert found(source + "rank = os.environ.get('LOCAL_RANK')\n") == []


@pytest.mark.parametrize("source", [PROCID, ARGUMENT + USED])
def test_a_script_that_asks_rankwise_needs_none_of_them(source: str) -> None:
    assert found(source + "from rankwise import init\n") == []


@pytest.mark.parametrize("source", ["", "import multiprocessing\nmultiprocessing.get_context('spawn')", "spawn()", "x.spawn()"])
def test_what_only_looks_alike_is_passed_over(source: str) -> None:
    assert found(source) == []


def test_the_launcher_says_it_before_the_ranks_start(rankwise) -> None:
    Path("train.py").write_text(PROCID)
    done = rankwise("run", "--nproc", "2", "train.py")
    assert done.returncode == 1
    warning, headline = [line for line in done.stderr.splitlines() if line.startswith("rankwise: ")][:2]
    assert warning.startswith("rankwise: warning: train.py, line 2 reads a rank from SLURM_PROCID")
    assert headline.startswith("rankwise: train.py on 2 ranks")


def test_one_rank_is_told_nothing(rankwise) -> None:
    Path("train.py").write_text(ARGUMENT)
    done = rankwise("run", "--nproc", "1", "train.py")
    assert done.returncode == 0
    assert "warning" not in done.stderr


# --- whether it certainly uses NCCL

ASK = "dist.init_process_group('nccl')"


def line(source: str) -> int | None:
    return asks_for_nccl(ast.parse(source))


@pytest.mark.parametrize(
    "call",
    [
        "init_process_group('nccl')", "dist.init_process_group('nccl')", "torch.distributed.init_process_group('nccl', rank=0)",
        "distributed.init_process_group(backend='nccl')", "dist.init_process_group(init_method='env://', backend='NCCL')",
        "group = dist.init_process_group('nccl')", "print(dist.init_process_group('nccl'))",
    ],
)  # fmt: skip
def test_a_call_on_the_modules_own_level_is_certain(call: str) -> None:
    assert line(f"import torch\n{call}\n") == 2


@pytest.mark.parametrize(
    ("source", "where"),
    [
        (f"if __name__ == '__main__':\n    {ASK}", 2),
        (f"def main():\n    {ASK}\nmain()", 2),
        (f"def main():\n    {ASK}\nif __name__ == '__main__':\n    main()", 2),
        (f"def main():\n    {ASK}\nif '__main__' == __name__:\n    sys.exit(main())", 2),
        (f"def setup():\n    {ASK}\ndef main(args):\n    setup()\n    return 0\nmain(parse())", 2),
        (f"def f():\n    f()\n    {ASK}\nf()", 3),
        (f"@record\ndef main():\n    {ASK}\nmain()", 3),
        (f"if args.lr:\n    lr = 1\nfor i in range(3):\n    pass\n{ASK}", 5),
    ],
)
def test_so_is_one_in_a_function_that_is_certain_to_be_called(source: str, where: int) -> None:
    assert line(source) == where


@pytest.mark.parametrize(
    "source",
    [
        f"if torch.cuda.is_available():\n    {ASK}",
        f"if cpu:\n    pass\nelse:\n    {ASK}",
        f"try:\n    {ASK}\nexcept RuntimeError:\n    pass",
        f"with suppress(RuntimeError):\n    {ASK}",
        f"for i in range(n):\n    {ASK}",
        f"while again():\n    {ASK}",
        f"match device:\n    case 'cuda':\n        {ASK}",
        f"cuda and {ASK}",
        f"{ASK} if cuda else None",
        f"f = lambda: {ASK}",
        f"[{ASK} for _ in range(n)]",
        f"def main():\n    {ASK}",
        f"def main():\n    {ASK}\nif cuda:\n    main()",
        f"def main():\n    {ASK}\ntry:\n    main()\nfinally:\n    pass",
        f"class C:\n    def main(self):\n        {ASK}\nC().main()",
        f"@hydra.main()\ndef main():\n    {ASK}\nmain()",
        f"def main():\n    {ASK}\n    yield\nmain()",
        f"def main():\n    {ASK}\nmp.spawn(main)",
        f"async def main():\n    {ASK}\nmain()",
        f"if not cuda:\n    sys.exit('needs a GPU')\n{ASK}",
        f"if not cuda:\n    raise SystemExit\n{ASK}",
        f"assert torch.cuda.is_available()\n{ASK}",
        f"def check():\n    if not cuda:\n        sys.exit(1)\ncheck()\n{ASK}",
        f"def deeper():\n    raise SystemExit\ndef check():\n    if cpu: deeper()\ncheck()\n{ASK}",
        f"def main():\n    if not cuda:\n        return\n    {ASK}\nmain()",
        f"def init_process_group(backend): pass\n{ASK}",
        "dist.init_process_group('gloo')",
        "dist.init_process_group('cpu:gloo,cuda:nccl')",
        "dist.init_process_group(backend=args.backend)",
        "dist.init_process_group('nccl' if cuda else 'gloo')",
        "dist.init_process_group()",
        "dist.new_group(backend='nccl')",
        "print('nccl')",
    ],
)
def test_what_may_not_run_or_is_no_such_call_is_not(source: str) -> None:
    assert line(source) is None


def test_a_script_that_needs_nccl_where_it_cannot_be_is_refused_before_anything_is_started(rankwise, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"import torch.distributed as dist\n{ASK}\n")
    done = rankwise("run", "--nproc", "2", "train.py", env={**__import__("os").environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2
    assert done.stderr.startswith("rankwise: train.py, line 2: it asks for the backend nccl, and CUDA_VISIBLE_DEVICES= hides")
    assert 'write init_process_group("gloo") there' in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_an_expression_of_hundreds_of_parts_is_not_examined(tmp_path: Path) -> None:
    for number in (250, 5000):  # Python runs the first one
        (tmp_path / "deep.py").write_text("x = []" + ".copy()" * number + "\n")
        assert examine(str(tmp_path / "deep.py")).pitfalls == ()
