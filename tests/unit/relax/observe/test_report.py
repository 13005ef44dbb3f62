"""The report: one page that stands alone, escapes all it is told, and copes with what is missing."""

from __future__ import annotations

import re
import zipfile
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pytest

from relax.observe.charts import ChartMaker, moving_mean
from relax.observe.embedding import EmbeddingLimits, MediaEmbedder, sniff
from relax.observe.report import ReportInputs, ReportLimits, build_report

VOID = {"meta", "img", "br", "link", "input", "hr"}


class _Page(HTMLParser):
    """Tags and their attributes, text, ids; checks that tags nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


INPUTS = ReportInputs(
    outcome="finished",
    config_text="name: omni_grpo\nseed: 0  # <i>\n",
    duration_s=131.0,
    max_staleness=2,
    rows_per_version=24,
)


@pytest.fixture(scope="module")
def page_text(recorded_run: Path) -> str:
    errors = {"stage": ["preprocess"] * 3, "place": ["line 7"] * 3, "reason": ["image: <b>truncated</b>"] * 3}
    inputs = replace(INPUTS, media_base_dirs={"": recorded_run}, row_errors=pa.table(errors))
    return build_report(recorded_run, inputs).read_text()


def test_report_shows_a_curve_and_a_number_for_each_modality(page_text: str) -> None:
    """Three curves, age, throughput, mismatch and time shares; last held-out mean with its count."""
    page = _Page(page_text)
    assert page.count("svg") == 7
    titles = re.findall(r"<title id=\"chart\d+-title\">(.*?)</title>", page_text)
    assert [title for title in titles if "Mean reward" in title] == [
        "Mean reward, audio",
        "Mean reward, image",
        "Mean reward, video",
    ]
    assert "0.875" in page.text
    assert "8 prompts, policy version 12; 0.125 at first" in page.text
    assert "2 policy versions = 48 rollouts" in page.text
    assert "In 87.5 % of tokens and layers the trainer's routers choose the rollout's experts" in page.text
    assert "2:11" in page.text
    assert "Rollouts recorded" in page.text
    assert "288" in page.text


def test_report_is_escaped_and_allows_no_script(page_text: str) -> None:
    """An answer with a script is text; no script, no network, ids used once."""
    page = _Page(page_text)
    assert page.count("script") == 0
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;" in page_text
    assert "image: &lt;b&gt;truncated&lt;/b&gt;" in page_text
    assert "seed: 0  # &lt;i&gt;" in page_text
    sources = [attrs[key] for _, attrs in page.tags for key in ("src", "href") if key in attrs]
    assert sources
    assert all(source and source.startswith("data:") for source in sources)
    ids = Counter(attrs["id"] for _, attrs in page.tags if "id" in attrs)
    assert [name for name, number in ids.items() if number > 1] == []
    assert "url(http" not in page_text
    assert "default-src 'none'" in page_text


def test_report_embeds_picture_sound_and_film(page_text: str) -> None:
    """Slowest wrong answers carry their media; a missing file is said."""
    page = _Page(page_text)
    assert page.count("img") == page.count("audio") == page.count("video") == 4 - 1
    assert "data:image/png;base64," in page_text
    assert "data:audio/wav;base64," in page_text
    assert "data:video/mp4;base64," in page_text
    assert page.text.count("not readable: No such file or directory") == 3
    audio = page.text[page.text.index("Slowest wrong answers") :]
    assert audio.index("Question 7") < audio.index("Question 6")


def test_report_has_an_entry_for_each_evaluation_set(tmp_path: Path) -> None:
    """Each modality of each set, and media from the set's own directory."""
    rows = []
    for name, modality, reward in (("near", "image", 0.0), ("far", "image", 1.0), ("far", "audio", 0.5)):
        facts = {
            "policy_version_start": 3,
            "generate_s": 0.1,
            "completion_text": "a",
            "reference_answer": "b",
        }
        rows.append(facts | {"source": name, "modality": modality, "reward": reward, "prompt_text": "q"})
    rows[0]["media_paths"] = ["here.png"]
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "here.png").write_bytes(b"\x89PNG\r\n\x1a\n and a picture")
    inputs = replace(
        INPUTS, eval_rollouts=pa.Table.from_pylist(rows), media_base_dirs={"near": tmp_path / "near"}
    )
    text = build_report(tmp_path, inputs).read_text()
    titles = re.findall(r"<title id=\"chart\d+-title\">Mean reward, (.*?)</title>", text)
    assert titles == ["audio, far", "image, far", "image, near"]
    assert _Page(text).count("img") == 1


def test_report_without_anything_still_is_a_page(tmp_path: Path) -> None:
    """An empty run directory gives a page that says what is missing."""
    page = _Page(build_report(tmp_path).read_text())
    assert "Neither recorded rollouts nor evaluations were found" in page.text
    assert page.count("svg") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html"]


def test_report_copes_with_odd_modalities_and_rewards(tmp_path: Path) -> None:
    """Names with markup and dollars, rewards that are no numbers, null answers, a thousand kinds of errors."""
    rows = [
        {
            "modality": "a<b>$x_$",
            "reward": reward,
            "policy_version_start": 0,
            "completion_text": None,
            "generate_s": None,
        }
        | {"reference_answer": "y" * 5000, "prompt_text": f"q{index}", "media_paths": None}
        for index, reward in enumerate([float("nan"), None, 1.0])
    ]
    errors = pa.table({"stage": ["s"] * 1000, "place": [str(i) for i in range(1000)], "reason": ["r"] * 1000})
    inputs = ReportInputs(eval_rollouts=pa.Table.from_pylist(rows), row_errors=errors)
    text = build_report(tmp_path, inputs, limits=ReportLimits(answers_per_modality=9)).read_text()
    page = _Page(text)
    assert "a&lt;b&gt;$x_$" in text
    assert page.text.count("(nothing)") == 2
    assert "(3,000 more characters)" in page.text
    assert "and 950 more kinds" in page.text


def test_charts_are_well_formed_svg_in_page_colours() -> None:
    """XML parses; no colour of the drawing library is left; ids differ between charts."""
    maker = ChartMaker()
    nothing = (np.zeros(0), np.zeros(0))
    first = maker.reward_curve("<one>", (np.arange(3), np.array([0.0, 0.5, 1.0])), nothing)
    second = maker.bars("two", {0: 3, 2: 1}, "age", bound=4)
    for svg in (first, second):
        ElementTree.fromstring(svg.replace("xlink:href", "href"))
        assert set(re.findall(r"#[0-9a-f]{6}", svg)) == set()
        assert "var(--series-1)" in svg
    assert set(re.findall(r' id="(.*?)"', first)).isdisjoint(re.findall(r' id="(.*?)"', second))
    assert '<title id="chart1-title">&lt;one&gt;</title>' in first


def test_moving_mean_averages_the_values_before() -> None:
    """Hand-computed."""
    np.testing.assert_allclose(moving_mean(np.array([1.0, 3.0, 5.0, 7.0]), window=2), [1, 2, 4, 6])


@pytest.mark.parametrize(
    ("data", "mime"),
    [
        (b"\x89PNG\r\n\x1a\n", "image/png"),
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"RIFF\0\0\0\0WAVE", "audio/wav"),
        (b"RIFF\0\0\0\0WEBP", "image/webp"),
        (b"RIFF\0\0\0\0AVI ", None),
        (b"fLaC", "audio/flac"),
        (b"OggS", "audio/ogg"),
        (b"ID3\x04", "audio/mpeg"),
        (b"\xff\xfb\x90", "audio/mpeg"),
        (b"\0\0\0\x20ftypisom", "video/mp4"),
        (b"\0\0\0\x20ftypM4A ", "audio/mp4"),
        (b"\x1aE\xdf\xa3", "video/webm"),
        (b"<svg onload=alert(1)>", None),
        (b"root:x:0:0", None),
        (b"", None),
    ],
)
def test_sniff_tells_media_by_their_first_bytes(data: bytes, mime: str | None) -> None:
    """Only kinds that a page can show, and none that can hold a script."""
    assert sniff(data) == mime


def test_embedder_says_why_a_source_is_not_shown(tmp_path: Path) -> None:
    """Too large, not media, a full page, a remote address, a bad data URI: a note each, no error."""
    (tmp_path / "big.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    (tmp_path / "ok.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(50))
    (tmp_path / "secrets.png").write_bytes(b"password")
    embedder = MediaEmbedder(tmp_path, EmbeddingLimits(max_file_bytes=90, max_total_bytes=100))
    assert "at most 90 bytes to be embedded, got 108" in embedder.embed("big.png").note
    assert embedder.embed("secrets.png").note == "not embedded: no picture, sound or film of a known kind"
    assert embedder.embed("ok.png").uri.startswith("data:image/png;base64,")
    assert embedder.embed("ok.png").note == "not embedded: the page holds its 100 bytes of media"
    assert embedder.embed("http://example.com/a.png").note == "not readable: the page embeds local files only"
    assert embedder.embed("data:image/png;base64,%%").kind == "none"
    assert embedder.embed("x" * 5000).note.startswith("not readable: ")
    assert embedder.embed("nul\0byte.png").note.startswith("not readable: ")


def test_embedder_reads_other_sources_by_the_given_reader(tmp_path: Path) -> None:
    """A member of an archive is shown when the caller can read it."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("m.flac", b"fLaC" + bytes(10))

    def read(source: str) -> bytes:
        archive_name, _, member = source.partition("!")
        return zipfile.ZipFile(tmp_path / archive_name).read(member)

    assert MediaEmbedder(tmp_path, read=read).embed("a.zip!m.flac").kind == "audio"
