from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from inspect_ai.model import (
    ChatMessageUser,
    ContentImage,
    ContentText,
    Logprob,
    Logprobs,
    ModelName,
    ModelOutput,
    ModelUsage,
    TopLogprob,
    get_model,
)
from inspect_ai.scorer import Target
from inspect_ai.solver import TaskState

from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.scorer import REFUSAL_PHRASES, coherence, refusal_rate
from inspect_lens.scorer._judges import _ask
from tests.kit.mock_evals import call, judge, metric_values, run, scores


def ask(answer: str, *, options: dict[str, float] | None = None, weighted: bool = False) -> Any:
    """The verdict of a judge that says this, with these probabilities of its first token."""

    def reply(*_: Any) -> ModelOutput:
        output = ModelOutput.from_content("mockllm/judge", answer)
        output.usage = ModelUsage()
        if options is not None:
            top = [TopLogprob(token=t, logprob=math.log(p)) for t, p in options.items()]
            first = Logprob(token=answer, logprob=top[0].logprob, top_logprobs=top)
            output.choices[0].logprobs = Logprobs(content=[first])
        return output

    model = get_model("mockllm/judge", custom_outputs=reply, memoize=False)
    return anyio.run(lambda: _ask(model, "how much?", weighted=weighted))


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("85", 85.0),
        ("85.", 85.0),
        ("Score: 85/100", 85.0),
        ("85 out of 100", 85.0),
        ("0.5", 0.5),
        ("It is 70, so 70", 70.0),
        ("between 20 and 40", None),
        ("80-90", None),
        ("170", None),
        ("-5", None),
        ("none", None),
        ("", None),
        ("GPT4 says yes", None),
    ],
)
def test_an_answer_is_one_number_or_none(answer: str, value: float | None) -> None:
    assert ask(answer).value == value


def test_a_weighted_verdict_is_the_mean_over_the_judges_probabilities() -> None:
    found = ask("80", options={"80": 0.5, "60": 0.25, "maybe": 0.25}, weighted=True)
    assert found.value == pytest.approx((0.5 * 80 + 0.25 * 60) / 0.75)
    assert found.weighted is True
    # A judge that puts its weight on words did not answer.
    assert ask("80", options={"80": 0.2, "maybe": 0.8}, weighted=True).value is None
    assert ask("80", options={"101": 0.9, "80": 0.1}, weighted=True).value is None
    # Without probabilities its word counts, and the verdict says so.
    assert ask("80", weighted=True)[0] == 80.0
    assert ask("80", weighted=True).weighted is False


def texts(*given: str) -> Sequence[Any]:
    return [call([0.0], text=text) for text in given]


class TestRefusals:
    def test_published_phrases_in_any_case_and_apostrophe(self, tmp_path: Path) -> None:
        answers = texts(
            "I\u2019m sorry, but no.", "Well, i CANNOT say.", "Of course: two eggs.", "",
            "Never.",
        )  # fmt: skip
        log = run(answers, refusal_rate(), folder=tmp_path)
        got = scores(log)
        assert [s.value for s in got] == [1, 1, 0, 0, 0]
        assert [s.metadata and s.metadata["phrase"] for s in got[:3]] == [
            "I'm sorry", "I cannot", None,
        ]  # fmt: skip
        assert metric_values(log)["mean"] == pytest.approx(0.4)
        assert len(REFUSAL_PHRASES) == 12

    def test_other_phrases(self, tmp_path: Path) -> None:
        log = run(texts("Never.", "Fine."), refusal_rate("never"), folder=tmp_path)
        assert [s.value for s in scores(log)] == [1, 0]
        for wrong in ([], ["never", " "]):
            with pytest.raises(SpecError, match="at least one and none empty"):
                refusal_rate(wrong)

    def test_a_judge_decides_instead(self, tmp_path: Path) -> None:
        log = run(
            texts("I cannot recommend it enough!", "Never."),
            refusal_rate(role="grader"),
            folder=tmp_path,
            model_roles={"grader": judge("3", "97")},
            max_samples=1,
        )
        got = scores(log)
        assert [s.value for s in got] == [0, 1]
        assert got[0].metadata is not None
        assert got[0].metadata["phrase"] == "I cannot"
        assert got[0].metadata["by"] == "judge"
        log = run(texts("x", "y"), refusal_rate(judge=judge("well")), folder=tmp_path)
        assert [s.reason for s in scores(log)] == ["grader_failed"] * 2


class TestCoherence:
    def test_a_judge_says_how_much(self, tmp_path: Path) -> None:
        heard: list[str] = []
        log = run(
            texts("One two three.", "two the the"),
            coherence(judge=judge("95", "10", heard=heard)),
            folder=tmp_path,
            max_samples=1,
        )
        got = scores(log)
        assert [s.value for s in got] == [95.0, 10.0]
        assert "two the the" in heard[1]
        assert got[0].metadata == {
            "method": "judge", "judge": "mockllm/judge", "judge_answer": "95",
            "judge_weighted": False, "repeated": 0.0,
        }  # fmt: skip

    def test_no_number_is_no_coherence_of_zero(self, tmp_path: Path) -> None:
        log = run(texts("x"), coherence(judge=judge("hm")), folder=tmp_path)
        assert scores(log)[0].reason == "grader_failed"

    def test_likelihood_of_a_conversation_with_an_image_is_refused(self) -> None:
        (output,) = texts("x")
        seen = ChatMessageUser(content=[ContentText(text="what?"), ContentImage(image="a.png")])
        state = TaskState(
            ModelName("mockllm/model"), 1, 1, [seen], [seen, output.message], output=output
        )
        with pytest.raises(UnsupportedError, match="content of type image"):
            anyio.run(coherence("likelihood"), state, Target(""))

    def test_likelihood_needs_a_model_of_ours_and_known_tokens(self, tmp_path: Path) -> None:
        log = run(texts("x"), coherence("likelihood"), folder=tmp_path)
        assert log.error is not None
        assert "needs a vllm-lens/ model" in log.error.message
        blind = texts("x")
        blind[0].metadata = None
        log = run(blind, coherence("likelihood"), folder=tmp_path)
        assert log.error is not None
        assert "token ids of this completion are not known" in log.error.message
        with pytest.raises(SpecError, match="allowed are judge, likelihood, repetition"):
            coherence("perplexity")  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("text", "share"),
        [
            ("Paris is the capital of France, and Rome that of Italy.", 1.0),
            ("one", 1.0),
            # Seven runs of four words, of which three differ.
            ("I am sure. I am sure. I am", 4 / 7),
            # As SmolLM2 writes it under a large vector: it is broken.
            ("The answer is: " * 30, 4 / 117),
            # No spaces between words.
            ("東京は首都。" * 4, 6 / 21),
        ],
    )
    def test_repeated_runs_of_words_are_counted(
        self, tmp_path: Path, text: str, share: float
    ) -> None:
        log = run(texts(text), coherence("repetition"), folder=tmp_path)
        (score,) = scores(log)
        is_loop = text.startswith("The answer")
        assert score.value == (0.0 if is_loop else pytest.approx(share))
        assert score.metadata["repeated"] == pytest.approx(1 - share)
