from __future__ import annotations

import pytest

from tests.kit.engine_errors import last_error

pytest_plugins = ["pytester"]

_CORE = "(EngineCore pid=7) ERROR 11-29 20:50:23 [core.py:1510] "
LOG = f"""\
(MainProcess pid=5) INFO 11-29 20:47:32 [model.py:733] Resolved architecture: LlamaForCausalLM
{_CORE}EngineCore failed to start.
{_CORE}Traceback (most recent call last):
{_CORE}  File "/home/me/venv/lib/python3.12/site-packages/vllm/v1/core.py", line 1482, in run_core
{_CORE}    engine_core = EngineCoreProc(*args, **kwargs)
{_CORE}  File "/home/me/venv/lib/python3.12/site-packages/vllm/model/gdn.py", line 31, in __init__
{_CORE}    raise ValueError(
{_CORE}ValueError: No kernel for /home/me/models/tiny; see https://docs.vllm.ai/en/latest/kernels
{_CORE}  head_dim has to be 128
(EngineCore pid=7) ERROR 11-29 20:50:34 [executor.py:315] Worker proc died unexpectedly
(EngineCore pid=7) INFO 11-29 20:50:34 [executor.py:486] [shutdown] all workers exited
Exception ignored in: <function ResourceTracker.__del__>
ChildProcessError: [Errno 10] No child processes
"""
ERROR = (
    "ValueError: No kernel for tiny; see https://docs.vllm.ai/en/latest/kernels "
    "head_dim has to be 128 (vllm/model/gdn.py:31, __init__)"
)


def test_the_cause_is_the_last_error_that_an_engine_logged_without_folders() -> None:
    assert last_error(LOG) == ERROR
    # The executor's process only passes on that another failed.
    passed_on = f"{_CORE}RuntimeError: Engine core initialization failed. See root cause above.\n"
    assert last_error(LOG + passed_on) == ERROR


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (
            '  File "/a/b.py", line 3, in f\n    x\ntorch.OutOfMemoryError: CUDA out of memory',
            "torch.OutOfMemoryError: CUDA out of memory (b.py:3, f)",
        ),
        ("Fatal Python error: Segmentation fault\n\n", "Fatal Python error: Segmentation fault"),
        ("one\n\x1b[1mtwo\x1b[0m\n", "two"),
        ("", "nothing"),
    ],
)
def test_a_log_without_the_engines_own_error_says_what_it_can(log: str, said: str) -> None:
    assert last_error(log) == said


def test_a_failed_start_has_its_cause_in_the_summary(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        f"""
        def test_a_start():
            print({LOG!r})
            raise RuntimeError("Engine core initialization failed. See root cause above.")

        def test_another():
            print({LOG!r})
            raise RuntimeError("something else")
        """
    )
    found = pytester.runpytest("-p", "tests.kit.engine_errors", "-p", "no:cacheprovider")
    found.assert_outcomes(failed=2)
    # Where CI is set, pytest's own closing lines are not cut, and have it, too.
    lines = [line for line in found.outlines if ERROR in line and not line.startswith("FAILED")]
    assert len(lines) == 1
    assert "::test_a_start: RuntimeError: Engine core" in lines[0]
