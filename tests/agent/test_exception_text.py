"""The short text of a rank's exception."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankwise.agent import exception_text
from rankwise.agent.exception_text import ExceptionText, is_short_of_memory, line_of_crash, of_abort, parameter_counts, reword

IN_WORKER = """Caught KeyError in DataLoader worker process 1.
Original Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 374, in _worker_loop
    data = fetcher.fetch(index)
           ^^^^^^^^^^^^^^^^^^^^
  File "/home/ann/data.py", line 6, in __getitem__
    return self.files[i]
  File "/usr/lib/python3.11/json/decoder.py", line 355, in raw_decode
    raise KeyError
KeyError: 'audio_5'
"""


def record(kind: str, message: str, **more: object) -> dict[str, object]:
    return {"type": kind, "message": message, "where": "train.py:9", **more}


def test_an_exception_of_the_script_is_told_as_it_is() -> None:
    assert reword(record("ValueError", "loss is nan"), 1, "train.py") == ExceptionText("ValueError: loss is nan", "train.py:9")
    assert reword(record("MemoryError", ""), 0, "train.py").exception == "MemoryError"


def test_what_a_loader_worker_raised_is_told_with_the_users_line_and_the_worker() -> None:
    told = reword(record("KeyError", IN_WORKER), 1, "train.py")
    assert told == ExceptionText("KeyError: 'audio_5'", "data.py:6, in loader worker 1")


@pytest.mark.parametrize(
    ("folder", "told"), [("rankwise", "in loader worker 1"), ("rankwise-data", "mine.py:6, in loader worker 1")]
)
def test_a_folder_whose_name_begins_as_our_packages_does_is_the_users(folder: str, told: str) -> None:
    ours = Path(exception_text.__file__).parents[1]
    assert ours.name == "rankwise"
    worker = IN_WORKER.replace("/home/ann/data.py", str(ours.with_name(folder) / "mine.py"))
    assert reword(record("KeyError", worker), 1, "train.py").where == told


def test_an_exception_of_a_loader_worker_that_cannot_be_rebuilt_is_told_with_its_line_and_sample() -> None:
    message = (
        "raised in a loader worker:\nTraceback (most recent call last):\n"
        '  File "/home/ann/data.py", line 6, in __getitem__\n    raise Unreadable(path, 3)\n'
        "data.Unreadable: audio_5 is empty\nin sample 77 of Speech\n"
    )
    assert reword(record("DataError", message), 1, "train.py") == ExceptionText(
        "data.Unreadable: audio_5 is empty\nin sample 77 of Speech", "data.py:6, in a loader worker", "in sample 77 of Speech"
    )


def test_an_exception_that_a_loader_worker_has_sent_is_told_with_the_line_there() -> None:
    traceback = (
        'Traceback (most recent call last):\n  File "/home/ann/train.py", line 9, in <module>\n    trainer.fit()\n'
        "ValueError: audio_5 is empty\nin sample 77 of Speech\nraised in a loader worker:\n"
        'Traceback (most recent call last):\n  File "/home/ann/data.py", line 6, in __getitem__\n    raise ValueError(path)\n'
        "ValueError: audio_5 is empty\nin sample 77 of Speech\n"
    )
    told = reword(record("ValueError", "audio_5 is empty", traceback=traceback), 1, "train.py")
    assert (told.exception, told.where) == ("ValueError: audio_5 is empty", "data.py:6, in a loader worker")


SPAWNED = """

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torch/multiprocessing/spawn.py", line 96, in _wrap
    fn(i, *args)
  File "/home/ann/train.py", line 4, in work
    raise ValueError("no data")
ValueError: no data
"""
OF_A_POOL = '''multiprocessing.pool.RemoteTraceback:
"""
Traceback (most recent call last):
  File "/usr/lib/python3.11/multiprocessing/pool.py", line 125, in worker
    result = (True, func(*args, **kwds))
  File "/home/ann/prepare.py", line 3, in work
    raise ValueError("no sample")
ValueError: no sample
"""

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 6, in <module>
'''


def test_what_a_spawned_process_raised_is_told_with_its_own_line() -> None:
    told = reword(record("ProcessRaisedException", SPAWNED), 0, "train.py")
    assert told == ExceptionText("ValueError: no data", "train.py:4, in process 1, which the script spawned")


@pytest.mark.parametrize("head", ["multiprocessing.pool.RemoteTraceback:", "concurrent.futures.process._RemoteTraceback: "])
def test_what_a_process_of_a_pool_raised_is_told_with_its_own_line(head: str) -> None:
    text = OF_A_POOL.replace("multiprocessing.pool.RemoteTraceback:", head)
    told = reword(record("ValueError", "no sample", traceback=text), 0, "train.py")
    assert told == ExceptionText("ValueError: no sample", "prepare.py:3, in a process of its pool")


ABORTED = """terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at /gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4. Received data size
Fatal Python error: Aborted

Thread 0x00007f3f2f6146c0 (most recent call first):
  File "/venv/lib/python3.11/threading.py", line 235 in run

Thread 0x00007f3f4f018b80 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/ann/metrics.py", line 5 in mean
  File "/home/ann/train.py", line 50 in <module>

Extension modules: numpy
"""

CRASHED = """Fatal Python error: Segmentation fault

Current thread 0x00007fe735a21b80 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "train.py", line 27 in step
  File "train.py", line 39 in <module>

Thread 0x00007fe712b696c0 (most recent call first):
  File "/home/ann/other.py", line 258 in wait
"""


def test_an_abort_of_gloo_for_sizes_is_told_with_the_line_and_the_flag_that_names_ranks_and_shapes() -> None:
    said = of_abort(ABORTED, checked=False)
    assert said is not None
    assert said.startswith("in all_reduce it received 8 bytes but expected 4: the tensors of the ranks differ")
    assert said.endswith("; rankwise run --check-collectives shows which ranks, with their shapes and lines")
    checked = of_abort(ABORTED, checked=True)
    assert checked is not None
    assert "--check-collectives found no difference" in checked
    assert "rankwise run --check-collectives" not in checked
    assert "in a collective it received" in str(of_abort(ABORTED.partition("Fatal")[0], checked=False))


def test_of_a_crash_the_users_innermost_line_is_found_in_the_stack_of_the_thread_that_crashed() -> None:
    assert line_of_crash(ABORTED) == "metrics.py:5"
    assert line_of_crash(CRASHED) == "train.py:27"
    assert line_of_crash(ABORTED + CRASHED) == "train.py:27"
    assert line_of_crash('Current thread (most recent call first):\n  File "x.py", line 1 in f\n') is None


def test_another_abort_is_told_in_the_librarys_words_and_a_silent_one_not_at_all() -> None:
    assert of_abort("terminate called\n  what():  std::bad_alloc\n", checked=False) == "std::bad_alloc"
    assert of_abort("no word of it", checked=False) is None


def test_the_sizes_of_gloo_in_an_exception_point_to_the_flag_too() -> None:
    failed = record("RuntimeError", "[enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4. Received data size")
    assert "rankwise run --check-collectives" in str(reword(failed, 0, "t.py").remark)
    assert "rankwise run --check-collectives" not in str(reword(failed, 0, "t.py", checked=True).remark)


def test_what_was_noted_on_an_exception_is_told_too() -> None:
    told = reword(record("KeyError", IN_WORKER + "sample 5 of the dataset\n"), 1, "train.py")
    assert told.exception.splitlines() == ["KeyError: 'audio_5'", "sample 5 of the dataset"]
    assert told.remark == "sample 5 of the dataset"
    own = reword(record("ValueError", "bad", notes=["sample 7\nof 9", "more"]), 1, "train.py")
    assert own.remark == "sample 7"


ON_MAIN = """raised on the main rank:
Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/rankwise/dist/guards.py", line 126, in _attempt
    value = work()
  File "/home/ann/data.py", line 6, in read
    raise ValueError("no such speaker")
ValueError: no such speaker
"""


def test_an_exception_that_came_from_the_main_rank_is_told_with_its_own_line_and_that_rank() -> None:
    """The exception could not be pickled, or it could, and the traceback is a note on it."""
    lost = reword(record("MainProcessError", ON_MAIN), 1, "train.py")
    assert lost == ExceptionText("ValueError: no such speaker", "data.py:6, on the main rank")
    whole = reword(record("ValueError", "no such speaker", notes=[ON_MAIN]), 1, "train.py")
    assert whole == ExceptionText("ValueError: no such speaker", "train.py:9", "raised on the main rank (data.py:6)")
    ours = reword(record("ConfigError", "set x", notes=["raised on rank 2:\nTraceback ...\n", "more"]), 1, "train.py")
    assert ours.remark == "raised on rank 2"
    of_all = reword(record("ConfigError", "set x", notes=["raised on the main rank:\nTraceback ...\n"]), 1, "train.py")
    assert of_all.remark is None  # all ranks raise it


def test_of_an_exception_that_followed_another_in_a_worker_the_last_is_told() -> None:
    message = IN_WORKER + (
        "\nDuring handling of the above exception, another exception occurred:\n\nTraceback (most recent call last):\n"
        '  File "/home/ann/data.py", line 8, in __getitem__\n    raise RuntimeError("no audio") from None\n'
        "RuntimeError: no audio\n"
    )
    assert reword(record("RuntimeError", message), 0, "t.py") == ExceptionText(
        "RuntimeError: no audio", "data.py:8, in loader worker 1"
    )


UNUSED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that your "
    "module has parameters that were not used in producing loss. \n{}\n In addition, you can set the environment variable"
)


def test_parameters_that_a_loss_did_not_use_have_their_names() -> None:
    message = UNUSED.format("Parameter indices which did not receive grad for rank 1: 2 3")
    names = {"2": "extra.weight (Linear)", "3": "extra.bias (Linear)"}
    told = reword(record("RuntimeError", message, parameters=names), 1, "train.py")
    assert told.exception == "RuntimeError: the last loss did not use extra.weight (Linear), extra.bias (Linear)"
    assert told.remark is not None
    assert "find_unused_parameters=True" in told.remark


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        ("Parameter indices which did not receive grad for rank 1: 2 3", "number 2, number 3"),
        ("Parameters which did not receive grad for rank 1: extra.weight, extra.bias", "extra.weight, extra.bias"),
        ("Parameter indices which did not receive grad for rank 0: 1 2 3 4 5 6", "2, number 3, number 4 and 2 more"),
    ],
)  # fmt: skip
def test_without_names_from_the_model_torchs_words_do(listed: str, said: str) -> None:
    assert reword(record("RuntimeError", UNUSED.format(listed)), 1, "t.py").exception.endswith(said)


def test_a_parameter_of_another_shape_is_named() -> None:
    message = "[1]: params[2] in this process with sizes [4, 4] appears not to match sizes of the same param in process 0."
    told = reword(record("RuntimeError", message, parameters={"2": "head.weight (Linear)"}), 1, "t.py")
    assert told.exception == (
        "RuntimeError: its model differs from that of rank 0: parameter head.weight (Linear) has shape [4, 4] here"
    )
    assert "parameter number 2 has" in reword(record("RuntimeError", message), 1, "t.py").exception


def test_models_with_different_numbers_of_parameters_are_counted() -> None:
    said = "RuntimeError: DDP expects same model across all ranks, but Rank {} has {} params, while rank {} has inconsistent {}"
    assert parameter_counts({0: said.format(0, 4, 2, 6), 1: said.format(1, 4, 2, 6)}) == {0: 4, 1: 4, 2: 6}
    assert parameter_counts({0: "ValueError: loss is nan"}) == {}


def test_a_script_of_a_package_is_told_how_to_run_as_its_module(tmp_path: Path) -> None:
    (tmp_path / "lab" / "pkg").mkdir(parents=True)
    (tmp_path / "lab" / "__init__.py").touch()
    failed = record("ImportError", "attempted relative import with no known parent package")
    remark = reword(failed, 0, "lab/pkg/train.py").remark
    assert remark == "the script belongs to a package; type `rankwise run -m lab.pkg.train`"
    inside = reword(failed, 0, "/srv/other/train.py").remark
    assert inside == "the script belongs to a package; type `cd /srv && rankwise run -m other.train`"


def test_only_rank_0_has_the_terminal() -> None:
    failed = record("EOFError", "EOF when reading a line")
    assert "only rank 0 can read from the terminal" in (reword(failed, 1, "t.py").remark or "")
    assert reword(failed, 0, "t.py").remark is None


def test_a_shortage_is_told_with_its_count() -> None:
    told = reword(record("OSError", "[Errno 24] Too many open files: 'x'", shortage="40 of 40 files"), 1, "t.py")
    assert told == ExceptionText("OSError: [Errno 24] Too many open files: 'x'", "train.py:9", "40 of 40 files")


@pytest.mark.parametrize(
    ("exception", "short"),
    [
        ("MemoryError", True),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried", True),
        ("OSError: [Errno 12] Cannot allocate memory", True),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("ValueError: memory", False),
    ],
)
def test_only_the_machines_memory_is_compared_between_ranks(exception: str, short: bool) -> None:
    assert is_short_of_memory(exception) is short


ORDINAL = "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?\n"


def test_a_rank_of_a_task_that_sees_one_gpu_is_told_its_index() -> None:
    told = reword(record("AcceleratorError", ORDINAL, visible="3", local_rank="3"), 7, "train.py")
    assert told.remark is not None
    assert told.remark.startswith(
        "this rank sees 1 GPU (CUDA_VISIBLE_DEVICES=3), so the index is 0 whatever LOCAL_RANK is (here 3); use "
    )


@pytest.mark.parametrize(
    ("visible", "together", "said"),
    [
        ("0", 2, "LOCAL_RANK is 1, and this rank sees 1 GPU (CUDA_VISIBLE_DEVICES=0): type --nproc 1"),
        ("0,1", 4, "LOCAL_RANK is 1, and this rank sees 2 GPUs (CUDA_VISIBLE_DEVICES=0,1): type --nproc 2"),
        ("0,1", 2, "LOCAL_RANK is 1, and this rank sees 2 GPUs (CUDA_VISIBLE_DEVICES=0,1)"),
        (None, 4, "LOCAL_RANK is 1, and this rank sees fewer GPUs than that"),
    ],
)
def test_more_ranks_than_gpus_are_told_with_both(visible: str | None, together: int, said: str) -> None:
    told = reword(record("AssertionError", "Invalid device id", visible=visible, local_rank="1"), 1, "train.py", together)
    assert told.remark == said
