"""The page in a real Chromium: what it shows, and what keys and sliders change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from inspect_ai.log import write_eval_log

from inspect_lens.view import write_view
from tests.kit.browser import BROWSER, run_in_page
from tests.kit.page import Page, read_page
from tests.kit.planted_log import TOKENIZER, lose_activations, plant_log, planted_probe
from tests.kit.screenshot import REPORT

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")

TURNS = ("Where is it?", "And who </script> made it?", "Sure?")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Page]:
    folder = tmp_path_factory.mktemp("view")
    planted = plant_log(folder, planted_probe(folder), turns=TURNS, n=40)
    made = write_view(planted.log.location, folder / "p.html", tokenizer=str(TOKENIZER))
    return made.path, read_page(made.path)


def test_tokens_have_the_text_and_colour_of_their_score(page: tuple[Path, Page]) -> None:
    path, data = page
    seen = run_in_page(
        path,
        """
        await ready(0);
        const spans = [...document.querySelectorAll("#talk [data-i]")];
        seen.text = spans.map((s) => s.textContent);
        const kinds = () => spans.map((s) => [...s.classList].filter((c) => "wcu".includes(c))[0]);
        seen.kind = kinds();
        seen.unread = [0, 1].map((t) => document.querySelector(`#turn-${t} .line`).textContent);
        seen.strength = spans.map((s) => Number(s.style.getPropertyValue("--a")));
        const warm = document.querySelector(".t.w"), cool = document.querySelector(".t.c");
        seen.underlined = [warm, cool].map((s) => getComputedStyle(s).boxShadow !== "none");
        $("all-tokens").click();
        seen.every = kinds();
        seen.rows = document.querySelectorAll(".row").length;
        seen.roles = [...document.querySelectorAll(".turn .who b")].map((b) => b.textContent);
        """,
        hash="#s=0",
    )
    block = data.blocks[0]
    assert [t.replace("↵", "") for t in seen["text"]] == block.tokens
    scored, read = np.isfinite(block.scores[0]), block.read[0]
    assert (scored & ~read).any()
    kinds = ["w" if s > 1.0 else "c" for s in block.scores[0]]
    assert seen["every"] == [k if s else "u" for k, s in zip(kinds, scored, strict=True)]
    assert seen["kind"] == [k if r else "u" for k, r in zip(kinds, read, strict=True)]
    assert seen["unread"] == ["not read by the probe", "not read by the probe"], "system and user"
    strength = np.array(seen["strength"])[read]
    assert np.corrcoef(strength, np.abs(block.scores[0][read] - 1.0))[0, 1] > 0.95
    assert seen["underlined"] == [True, False], "not by colour alone"
    assert 5 < seen["rows"] < 40, "rows that nobody sees are not made"
    assert seen["roles"] == ["system", "user", "assistant", *["user", "assistant"] * 2]


def test_probe_layer_threshold_search_and_keys(page: tuple[Path, Page]) -> None:
    path, data = page
    seen = run_in_page(
        path,
        """
        await ready(0);
        const above = () => document.querySelectorAll("#talk .t.w").length;
        seen.layers = [...$("layer").options].map((o) => o.text);
        change("layer", "1");
        seen.layer1 = above();
        seen.own = $("threshold-reset").textContent;
        change("layer", "0");
        change("threshold-text", "-99");
        seen.all = above();
        seen.count = $("count").textContent;
        $("threshold-reset").click();
        seen.reset = $("threshold-text").value;
        press("n");
        seen.hot = Number(document.querySelector(".t.at").dataset.i);
        seen.tip = $("tip").textContent;
        seen.said = $("said").textContent;
        press("n"); press("p");
        seen.back = Number(document.querySelector(".t.at").dataset.i);
        seen.hash = location.hash;
        press("]"); press("]");
        seen.turn = document.querySelector('[aria-current="true"]').textContent;
        press("j"); await ready(1);
        seen.sample = document.querySelector("#facts h2").textContent;
        change("search", "s7", "input");
        const ids = () => [...document.querySelectorAll(".row .id")].map((r) => r.textContent);
        seen.found = ids();
        change("search", "", "input");
        change("filter", "positive"); change("sort", "high");
        seen.sorted = ids().slice(0, 5);
        const before = document.documentElement.dataset.theme;
        seen.kept = [localStorage.getItem("inspect-lens-theme")];
        press("d");
        seen.theme = before !== document.documentElement.dataset.theme;
        seen.kept.push(localStorage.getItem("inspect-lens-theme"));
        """,
        hash="#s=0",
    )
    first = data.blocks[0].scores
    assert seen["layers"] == ["mean of 1, 2", "1", "2"]
    median = data.facts["series"][1]["median"]
    read = data.blocks[0].read
    assert seen["layer1"] == int((first[1] > median)[read[1]].sum())
    assert seen["own"] == "median"
    assert seen["all"] == int(read[0].sum())
    assert "40 above the threshold" in seen["count"]
    assert seen["reset"] == "1"
    hot = np.flatnonzero((first[0] > 1.0) & read[0])
    assert seen["hot"] == seen["back"] == hot[0]
    assert f"score{first[0][hot[0]]:.3f}" in seen["tip"]
    assert f"token id{data.blocks[0].ids[hot[0]]}" in seen["tip"]
    assert f"score {first[0][hot[0]]:.3f}" in seen["said"]
    assert f"i={hot[0]}" in seen["hash"]
    assert seen["turn"] in ("system", "user", "assistant")
    assert seen["sample"].startswith("s1")
    assert seen["found"] == ["s7"]
    odd = [s for s in data.facts["samples"] if s["label"] == 1]
    wanted = sorted(odd, key=lambda s: -s["values"][0])
    assert seen["sorted"] == [s["id"] for s in wanted[:5]]
    assert seen["theme"] is True
    assert seen["kept"][0] is None, "the theme of the system is no choice"
    assert seen["kept"][1] in ("light", "dark")


def test_a_page_opens_at_the_sample_with_the_highest_score(page: tuple[Path, Page]) -> None:
    path, data = page
    values = [sample["values"][0] for sample in data.facts["samples"]]
    highest = int(np.argmax(values))
    assert highest != 0
    seen = run_in_page(
        path,
        """
        await until(() => document.documentElement.dataset.ready);
        seen.open = document.documentElement.dataset.ready;
        seen.row = document.querySelector('.row[aria-selected="true"] .id').textContent;
        """,
    )
    assert seen == {"open": str(highest), "row": data.facts["samples"][highest]["id"]}


def test_a_label_is_the_same_in_the_list_and_above_the_sample(tmp_path: Path) -> None:
    planted = plant_log(tmp_path, planted_probe(tmp_path), n=4)
    for sample, label in zip(planted.log.samples or [], (True, 0, "sarcasm", None), strict=True):
        sample.metadata = {"label": label}
    write_eval_log(planted.log)
    made = write_view(planted.log.location, tmp_path / "p.html", tokenizer=str(TOKENIZER))
    seen = run_in_page(
        made.path,
        """
        const chips = (box) => [...box.querySelectorAll(".chip")].map((c) => c.textContent);
        seen.head = [];
        for (let i = 0; i < 4; i++) {
          document.querySelectorAll(".row")[i].click();
          await ready(i);
          seen.head.push(chips(document.querySelector("h2")));
        }
        seen.list = [...document.querySelectorAll(".row")].map(chips);
        """,
        hash="#s=0",
    )
    assert seen["head"] == seen["list"] == [["label 1"], ["label 0"], ["sarcasm"], []]


def test_a_sample_without_calls_is_not_the_highest(tmp_path: Path) -> None:
    planted = plant_log(tmp_path, planted_probe(tmp_path), capture=bool, on_missing="skip")
    made = write_view(planted.log, tmp_path / "p.html", tokenizer=str(TOKENIZER))
    samples = read_page(made.path).facts["samples"]
    assert set(samples[0]["values"]) == {None}
    seen = run_in_page(
        made.path,
        """
        await until(() => document.documentElement.dataset.ready);
        seen.open = document.documentElement.dataset.ready;
        """,
    )
    assert seen == {"open": str(1 + int(np.argmax([s["values"][0] for s in samples[1:]])))}


def test_an_address_opens_its_token_and_a_narrow_window_has_a_drawer(
    page: tuple[Path, Page],
) -> None:
    path, _ = page
    seen = run_in_page(
        path,
        """
        await ready(3);
        await until(() => document.querySelector(".t.at"));
        seen.token = document.querySelector(".t.at").dataset.i;
        seen.threshold = $("threshold-text").value;
        const side = () => getComputedStyle($("side")).visibility;
        seen.closed = side();
        $("drawer").click();
        await wait(300);
        seen.open = side();
        seen.fits = $("threshold-reset").getBoundingClientRect().right <= innerWidth;
        seen.wide = document.documentElement.scrollWidth <= innerWidth;
        """,
        width=500,
        hash="#s=3&k=2&t=0.25&i=9",
    )
    assert seen == {"token": "9", "threshold": "0.250", "closed": "hidden", "open": "visible",
                    "wide": True, "fits": True}  # fmt: skip


def test_the_page_says_where_its_scores_come_from(tmp_path: Path) -> None:
    planted = plant_log(tmp_path, planted_probe(tmp_path), turns=TURNS, n=1)
    lose_activations(tmp_path)
    made = write_view(planted.log.location, tmp_path / "p.html", tokenizer=str(TOKENIZER))
    page = read_page(made.path)
    seen = run_in_page(
        made.path,
        """
        await ready(0);
        seen.facts = $("facts").textContent;
        seen.calls = [...document.querySelectorAll(".call")].map((c) => c.textContent);
        seen.coloured = document.querySelectorAll("#talk .t.w, #talk .t.c").length;
        seen.text = [...document.querySelectorAll(".said")].map((s) => s.textContent);
        const counts = [...document.querySelectorAll(".who span:first-of-type")];
        seen.counts = counts.map((s) => s.textContent);
        seen.now = document.querySelector('#turn-list [aria-current="true"]').parentElement;
        seen.now = [...$("turn-list").children].indexOf(seen.now);
        seen.notes = [...document.querySelectorAll("#notes li")].map((n) => n.textContent);
        const tip = (i) => {
          document.querySelector(`#talk [data-i="${i}"]`).dispatchEvent(
            new MouseEvent("mouseover", { bubbles: true }));
          return $("tip").textContent;
        };
        seen.message = tip(0);
        const first = document.querySelector("#talk .t.w, #talk .t.c");
        seen.token = tip(Number(first.dataset.i));
        """,
    )
    assert "token scores kept by probe_score" in seen["facts"]
    assert "activations not here" in seen["calls"][0]
    assert "as a scorer kept them" in seen["calls"][2]
    assert seen["coloured"] == int(np.isfinite(page.blocks[0].scores[0]).sum()) > 3
    assert seen["text"][:3] == ["Be <b>kind</b>.", TURNS[0], "It is found in Verun."]
    assert seen["counts"] == [*["text"] * 6, f"{len(planted.ids[-1][1]) - 1} tokens"]
    assert seen["now"] == 6, "the turn that has scores"
    assert f"tokens {len(planted.ids[-1][1]) - 1}" in seen["facts"]
    assert seen["notes"] == list(made.notes)
    assert "its tokens were not scored" in seen["message"]
    assert f"position{len(planted.ids[-1][0])} (completion 0)" in seen["token"]


def test_a_report_fits_a_narrow_window(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(REPORT.read_text(encoding="utf-8"), encoding="utf-8")
    seen = run_in_page(
        tmp_path / "report.html",
        """
        seen.wide = document.documentElement.scrollWidth <= innerWidth;
        const tables = [...document.querySelectorAll("main .wide")];
        seen.names = new Set(tables.map((t) => t.getAttribute("aria-label"))).size;
        seen.tables = tables.length;
        seen.reached = tables.every((t) => t.tabIndex === 0);
        """,
        width=500,
    )
    assert seen["wide"]
    assert seen["reached"]
    assert seen["names"] == seen["tables"] >= 4
