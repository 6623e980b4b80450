"""Every example, and all Python of the documentation, computes on the local device: tested with a fake GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fake_device import on_a_fake_gpu
from ranks import on_ranks
from test_docs import EXAMPLES, PYTHON, ROOT, blocks

FUNCTION = blocks("py", (ROOT / "docs" / "functions.md").read_text())[0]


def shortened(text: str) -> str:
    """One epoch is enough, and a short text."""
    epochs = r"max_epochs=\d+|EPOCHS, EVERY = \d+|for epoch in range\(\d+"
    text = re.sub(epochs, lambda found: re.sub(r"\d+", "1", found[0]), text)
    return text.replace("64 * 1024", "2 * 1024").replace(", 300)", ", 3)")


SHOWN = {
    **{name: shortened((ROOT / "examples" / name).read_text()) for name in EXAMPLES},
    # Without the one that only shows how a state is saved, and computes nothing.
    **{f"python {k}": text for k, text in enumerate(PYTHON) if "class PerRank" not in text},
    # It would start separate ranks, which do not know this fake GPU. Here the function is called directly.
    "a function": FUNCTION.replace("rankwise.run_function(train, (0.1,))", "train(0.1)"),
}
WORDS = {"04_gpt.py": ("--steps", "2", "--batch", "4")}


DEAREST = "01_torchrun_script.py"  # its loop is that of 02_own_loop.py


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.stress) if n == DEAREST else n for n in SHOWN])
@pytest.mark.one_in(6)
def test_what_is_shown_computes_on_the_local_device(name: str) -> None:
    Path("shown.py").write_text(SHOWN[name])
    [uses] = on_ranks(1, on_a_fake_gpu, "shown.py", *WORDS.get(name, ()))
    assert uses
    assert {device for _, device in uses} == {"meta"}, uses


def test_a_script_that_forgets_the_device_is_found() -> None:
    """It forgets the device of the model, that of the batches, and both."""
    text = PYTHON[0]
    assert text.count(".to(device)") == text.count("max_epochs=2)") == 1
    without_batches = text.replace("max_epochs=2)", 'max_epochs=2, device="cpu")')
    Path("shown.py").write_text(without_batches.replace(".to(device)", ""))
    [uses] = on_ranks(1, on_a_fake_gpu, "shown.py")
    assert {device for _, device in uses} == {"cpu"}
    for forgetful in (without_batches, text.replace(".to(device)", "")):
        Path("shown.py").write_text(forgetful)
        with pytest.raises(AssertionError, match="expected all tensors to be on the same device"):
            on_ranks(1, on_a_fake_gpu, "shown.py")
