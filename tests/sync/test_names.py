"""Strategies by their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import torchrun
from torch import nn

from rankwise import Trainer
from rankwise.errors import ConfigError
from rankwise.run.directory import ENV_RUN_DIR, RunDir
from rankwise.sync import AllReduce, DiLoCo, LocalSGD, named, names


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("all-reduce", AllReduce, {"promise": "exact"}),
        ("allreduce", AllReduce, {"promise": "exact"}),
        ("all-reduce:powersgd:2", AllReduce, {"promise": "rounded"}),
        ("local-sgd", LocalSGD, {"every": 16, "start": 0}),
        ("local-sgd:4", LocalSGD, {"every": 4, "seconds": None}),
        ("local-sgd:0.5m", LocalSGD, {"seconds": 30.0}),
        ("post-local-sgd:7", LocalSGD, {"start": 7, "every": 16}),
        ("post-local-sgd:7:3", LocalSGD, {"start": 7, "every": 3}),
        ("post-local-sgd:7:2s", LocalSGD, {"start": 7, "seconds": 2.0}),
        ("diloco", DiLoCo, {"every": 32}),
        ("diloco:8", DiLoCo, {"every": 8}),
        ("diloco:int8", DiLoCo, {"every": 32, "_compress": "int8"}),
        ("diloco:8:bf16", DiLoCo, {"every": 8, "_compress": "bf16"}),
    ],
)
def test_a_name_is_the_strategy_with_its_settings(name: str, kind: type, settings: dict[str, Any]) -> None:
    strategy = named(name)
    assert type(strategy) is kind
    assert {key: getattr(strategy, key) for key in settings} == settings


def test_every_example_names_a_strategy() -> None:
    for example in names.EXAMPLES:
        named(example)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "there is no such strategy; write one like all-reduce, all-reduce:bf16, "),
        ("ddp", "there is no such strategy; write one like "),
        ("locl-sgd:16", "there is no such strategy; did you mean local-sgd:16 or local-sgd:30s?"),
        ("Local_SGD", "there is no such strategy; did you mean local-sgd:16 or local-sgd:30s?"),
        ("local-sgd:0", "write it like local-sgd:16 or local-sgd:30s"),
        ("local-sgd:x", "write it like local-sgd:16 or local-sgd:30s"),
        ("local-sgd:1.5", "write it like local-sgd:16 or local-sgd:30s"),
        ("local-sgd:16:3", "write it like local-sgd:16 or local-sgd:30s"),
        ("post-local-sgd", "write it like post-local-sgd:1000 or post-local-sgd:1000:16"),
        ("post-local-sgd:0:4", "write it like post-local-sgd:1000 or post-local-sgd:1000:16"),
        ("diloco:1.5", "write it like diloco:32 or diloco:32:int8"),
        ("diloco:8:powersgd:2", "write it like diloco:32 or diloco:32:int8"),
        ("all-reduce:int4", "write it like all-reduce or all-reduce:bf16 or all-reduce:fp16 or"),
        ("all-reduce:powersgd:0", "write it like all-reduce or "),
    ],
)
def test_another_name_is_refused_with_what_to_give(name: str, said: str, tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    given: Any = (model, torch.optim.SGD(model.parameters(), 0.1), lambda model, batch: None, torch.zeros(4, 1))
    with pytest.raises(ConfigError) as caught:
        Trainer(*given, batch_size=2, max_steps=1, sync=name, run_dir=tmp_path)
    assert str(caught.value).startswith(f"sync={name}: {said}")


def test_without_a_name_it_is_what_was_typed_and_a_script_that_has_its_own_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert type(named()) is AllReduce
    run = RunDir(tmp_path)
    run.prepare(fresh=False)
    run.begin_attempt(1, ("train.py",), sync="local-sgd:5")
    for key, value in {ENV_RUN_DIR: str(tmp_path), **torchrun(0, 1, 1), "MASTER_ADDR": "::1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(key, value)
    typed = names.chosen(None)
    assert isinstance(typed, LocalSGD)
    assert typed.every == 5
    assert capfd.readouterr().out == ""
    own = AllReduce()
    assert names.chosen(own) is own
    assert isinstance(names.chosen("diloco:3"), DiLoCo)
    said = "--sync local-sgd:5 has no effect: the script sets its own strategy (sync=...)"
    assert capfd.readouterr().out.count(said) == 2
