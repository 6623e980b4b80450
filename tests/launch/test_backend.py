"""Whether a script is certain to ask for NCCL, and whether it can have it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from rankwise.launch.backend import asks_for_nccl, why_not_nccl

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


def test_without_a_device_file_of_any_vendor_there_is_no_gpu(tmp_path: Path) -> None:
    assert why_not_nccl({}, (), tmp_path) == "this machine has no GPU"
    assert why_not_nccl({"CUDA_VISIBLE_DEVICES": "0"}, (), tmp_path) == "this machine has no GPU"
    for name in ("nvidia0", "kfd", "dxg", "nvhost-gpu"):
        (tmp_path / name).touch()
        assert why_not_nccl({}, (), tmp_path) is None
        (tmp_path / name).unlink()


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_are_said_to_be_hidden(tmp_path: Path, hidden: str) -> None:
    (tmp_path / "nvidia0").touch()
    assert why_not_nccl({"CUDA_VISIBLE_DEVICES": hidden}, (), tmp_path) == f"CUDA_VISIBLE_DEVICES={hidden} hides every GPU"


def test_a_torch_without_cuda_is_named_with_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia0").touch()
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('it is not imported')")
    version = tmp_path / "torch" / "version.py"
    version.write_text("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    said = "the installed torch 2.13.0+cpu is built without CUDA"
    assert why_not_nccl({}, (sys.executable, "-u"), tmp_path) == said
    assert why_not_nccl({}, ("/other/python",), tmp_path) is None
    version.write_text("__version__ = '2.13.0'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n")
    assert why_not_nccl({}, (sys.executable,), tmp_path) is None


def test_a_script_that_needs_nccl_where_it_cannot_be_is_refused_before_anything_is_started(rankwise, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"import torch.distributed as dist\n{ASK}\n")
    done = rankwise("run", "--nproc", "2", "train.py", env={**__import__("os").environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2
    assert done.stderr.startswith("rankwise: train.py, line 2: it asks for the backend nccl, and CUDA_VISIBLE_DEVICES= hides")
    assert 'write init_process_group("gloo") there' in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()
