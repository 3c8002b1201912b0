"""The site that `dcp-lab report` writes, in a real browser: figures, slides, the console."""

from __future__ import annotations

import functools
import html
import http.server
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from dcp_lab.notebooks import NotebookError
from dcp_lab.notebooks.headlines import collect_headlines
from dcp_lab.notebooks.site import sources, write_site

ROOT = Path(__file__).resolve().parents[1]
COMMITTED = sorted((ROOT / "notebooks").glob("*.ipynb"))
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1920,1080",
    "--enable-logging=stderr",
    "--remote-debugging-port=0",
)
# Loads each page at the size of a projector, walks through its slides, and tells what it sees.
PROBE = """<!DOCTYPE html><link rel="icon" href="data:,"><body><script>
async function look(page) {
  const frame = document.createElement("iframe");
  frame.width = 1920; frame.height = 1080; frame.src = page;
  const loaded = new Promise((done) => { frame.onload = done; });
  document.body.append(frame);
  await loaded;
  const inside = frame.contentDocument, reveal = frame.contentWindow.eval(
    "typeof Reveal === 'undefined' ? null : Reveal");
  const images = [...inside.images];
  await Promise.all(images.map((image) => image.decode().catch(() => null)));
  const seen = {
    images: images.length,
    broken: images.filter((image) => !image.naturalWidth).length,
    scrolls_sideways: inside.documentElement.scrollWidth > 1920,
    outside: frame.contentWindow.performance.getEntriesByType("resource")
      .map((entry) => entry.name).filter((name) => !name.startsWith(location.origin)
        && !name.startsWith("data:")),
    slides: 0, cut: [],
  };
  if (reveal) {
    if (!reveal.isReady()) await new Promise((done) => reveal.on("ready", done));
    seen.slides = reveal.getTotalSlides();
    for (let i = 0; i < seen.slides; i++) {
      reveal.slide(i);
      const slide = reveal.getCurrentSlide(), content = slide.querySelector(".content");
      const box = slide.getBoundingClientRect();
      if (box.bottom > 1080 || box.right > 1921) seen.cut.push(i);
      // Only a long print may scroll: a figure or a text has to fit.
      const scrolls = content && content.style.overflowY === "auto";
      if (scrolls && !content.querySelector("pre")) seen.cut.push(i);
    }
  }
  frame.remove();
  return seen;
}
(async () => {
  const all = {};
  for (const page of PAGES) all[page] = await look(page);
  return all;
})().catch((error) => ({error: String(error)})).then(
  (all) => fetch("/seen", {method: "POST", body: JSON.stringify(all)}));
</script>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The committed notebooks as a site."""
    return write_site(COMMITTED, tmp_path_factory.mktemp("site") / "site").parent


def figures_of(path: Path) -> int:
    cells = nbformat.read(path, as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def browse(folder: Path, pages: list[str]) -> tuple[dict, list[str]]:
    """Return what the browser saw of each page, its console, and what it did not find."""
    if BROWSER is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    probe = folder / "probe.html"
    probe.write_text(PROBE.replace("PAGES", json.dumps(pages)))
    missing: list[str] = []
    answers: queue.Queue[dict] = queue.Queue()
    handler = functools.partial(Folder, directory=str(folder), missing=missing, answers=answers)
    log = folder.parent / "browser.log"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, log.open("w") as to:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        profile = f"--user-data-dir={folder.parent / 'profile'}"
        url = f"http://127.0.0.1:{server.server_address[1]}/probe.html"
        browser = subprocess.Popen([BROWSER, *FLAGS, profile, url], stdout=to, stderr=to)
        try:
            seen = answers.get(timeout=90)
        except queue.Empty:
            pytest.fail(f"the browser saw nothing in 90 s: {log.read_text()[-1000:]}")
        finally:
            browser.terminate()
            browser.wait(timeout=30)
            server.shutdown()
            probe.unlink()
    assert "error" not in seen, seen["error"]
    console = [line for line in log.read_text().splitlines() if "CONSOLE" in line]
    return seen, console + [f"not found: {path}" for path in missing]


class Folder(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, takes the probe's answer, and tells of what was asked for in vain."""

    def __init__(
        self, *args: object, missing: list[str], answers: queue.Queue[dict], **options: object
    ) -> None:
        self.missing, self.answers = missing, answers
        super().__init__(*args, **options)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()
        self.answers.put(json.loads(body))

    def log_error(self, *args: object) -> None:
        self.missing.append(self.path)

    def log_message(self, *args: object) -> None:
        pass


def test_a_browser_shows_every_page_and_slide(site):
    """Each figure is drawn, no slide is cut off, nothing is fetched, the console stays empty."""
    names = [path.stem for path in COMMITTED]
    pages = ["index.html", *(f"{n}.html" for n in names), *(f"slides/{n}.html" for n in names)]
    seen, console = browse(site, pages)
    assert console == []
    for path in COMMITTED:
        page, slides = seen[f"{path.stem}.html"], seen[f"slides/{path.stem}.html"]
        assert page["images"] == slides["images"] == figures_of(path)
        assert slides["slides"] > 5
    assert sum(page["images"] for page in seen.values()) > 0
    for name, page in seen.items():
        assert page["broken"] == 0 and page["outside"] == [] and page["cut"] == [], name
        assert not page["scrolls_sideways"], name


def test_the_browser_sees_what_is_wrong(tmp_path):
    """The look itself: a broken figure, a script's error and a missing file are seen."""
    folder = tmp_path / "site"
    folder.mkdir()
    page = "<img src='data:image/png;base64,aGVsbG8='><script src='none.js'></script>"
    (folder / "bad.html").write_text(f"{page}<script>throw new Error('told you')</script>")
    seen, console = browse(folder, ["bad.html"])
    assert seen["bad.html"]["images"] == seen["bad.html"]["broken"] == 1
    assert any("told you" in line for line in console)
    assert "not found: /none.js" in console


def test_the_index_has_verdict_numbers_and_links(site):
    """The index opens with 06's answer and lists every headline number with its basis."""
    index = (site / "index.html").read_text()
    question, verdict, words, numbers = (
        index.index(text)
        for text in (
            "<strong>Question.</strong> Where tensor parallelism",
            "DCP cost 4x because it made the host the longer queue",
            "<strong>Words.</strong> A <em>step</em>",
            "Headline numbers",
        )
    )
    assert index.index("The answer") < question < verdict < words < numbers
    rows = re.findall(r'<a href="(\w+)\.html">\1</a></td></tr>', index)
    assert rows[0] == "06_why_4x_tpot"
    for path in COMMITTED:
        for line in collect_headlines(nbformat.read(path, as_version=4)):
            row = f'<td>{html.escape(line.name, quote=False)}</td><td class="number">{line.text}'
            said = html.unescape(index)
            assert html.unescape(row) in said
            assert f"{line.text}</td><td>{line.basis}</td>" in said
    for page in site.rglob("*.html"):
        links = re.findall(r'(?:href|src)="([^":#]+?)(?:#[^"]*)?"', page.read_text())
        missing = [link for link in links if not (page.parent / link).exists()]
        # Links of the notebooks' own text lead into the repository.
        assert [m for m in missing if m.endswith((".html", ".css", ".js"))] == [], page.name


def test_slides_leave_out_code_and_exercises(site):
    """What a meeting looks at: text, tables, figures. No code cell, no exercise, no record."""
    for path in COMMITTED:
        slides = (site / "slides" / f"{path.stem}.html").read_text()
        assert '<details class="source"' not in slides
        assert '<h2 class="head">Exercises</h2>' not in slides
        assert slides.count("<script") == 2


def test_slides_have_the_verdict_and_short_lists(site):
    """06's computed verdict is the first slide, headline numbers are on several at the end."""
    slides = (site / "slides" / "06_why_4x_tpot.html").read_text()
    verdict = slides.index("DCP cost 4x because it made the host the longer queue")
    assert verdict < slides.index("<strong>Question.</strong>")
    assert slides.rindex("<img") < slides.index('<table class="headlines">')
    lists = re.findall(r'<table class="headlines">.*?</table>', slides, re.DOTALL)
    rows = [table.count("<tr><td>") for table in lists]
    assert len(rows) > 1 and max(rows) <= 14
    nb = nbformat.read(ROOT / "notebooks" / "06_why_4x_tpot.ipynb", as_version=4)
    assert sum(rows) == len(collect_headlines(nb))


def small(name: str, outputs: bool) -> nbformat.NotebookNode:
    cell = v4.new_code_cell("print(1)")
    cell.outputs = [v4.new_output("stream", text="1\n")] if outputs else []
    nb = v4.new_notebook(cells=[v4.new_markdown_cell(f"# {name}"), cell])
    nb.metadata["dcp_lab"] = {"kind": "teach"}
    return nb


def test_sources_prefer_a_current_copy(tmp_path):
    """A copy of an older notebook is not shown, nor one run with other parameters.

    A notebook without outputs is not shown either.
    """
    books, copies = tmp_path / "notebooks", tmp_path / "build" / "notebooks"
    books.mkdir()
    copies.mkdir(parents=True)
    shown = {"01_ran": True, "02_old": True, "03_never": False, "04_asked": True}
    for name, outputs in shown.items():
        nbformat.write(small(name, outputs), books / f"{name}.ipynb")
    nbformat.write(small("01_ran", True), copies / "01_ran.ipynb")
    nbformat.write(small("02 as it was", True), copies / "02_old.ipynb")
    asked = small("04_asked", True)
    cell = nbformat.v4.new_code_cell("tokens = 8192", metadata={"tags": ["injected-parameters"]})
    asked.cells.insert(0, cell)
    nbformat.write(asked, copies / "04_asked.ipynb")
    found = sources(tmp_path, tmp_path / "build")
    assert found == [copies / "01_ran.ipynb", books / "02_old.ipynb", books / "04_asked.ipynb"]


def test_a_site_is_replaced_whole_and_nothing_else_is(tmp_path):
    """A failed write leaves the old site; a folder that is no site is refused and kept."""
    copy = tmp_path / "01_a.ipynb"
    nbformat.write(small("01_a", True), copy)
    folder = tmp_path / "site"
    write_site([copy], folder)
    (folder / "stale.html").write_text("old")
    bad = tmp_path / "02_b.ipynb"
    bad.write_text("{")
    with pytest.raises(NotebookError, match="02_b"):
        write_site([copy, bad], folder)
    assert (folder / "stale.html").exists()
    write_site([copy], folder)
    assert not (folder / "stale.html").exists()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "index.html").write_text("my own page")
    with pytest.raises(NotebookError, match="expected no folder or an earlier site"):
        write_site([copy], mine)
    assert os.listdir(mine) == ["index.html"]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"01_a.ipynb", "02_b.ipynb", "site", "mine"}


def test_headline_numbers_are_notebook_06s():
    """data/headlines.json, which the README is held to, is what the committed notebook says."""
    done = subprocess.run([sys.executable, ROOT / "tools" / "headlines.py", "--check"])
    assert done.returncode == 0


def test_the_readme_quotes_the_headlines():
    """The README's answer has the numbers of data/headlines.json, rounded to what it shows."""
    told = json.loads((ROOT / "data" / "headlines.json").read_text())["numbers"]
    value_of = {line["name"]: line["value"] for line in told}
    readme = (ROOT / "README.md").read_text()
    text = re.search(r"\*\*The verdict\.\*\* (.*?)\n## ", readme, re.DOTALL)[1]
    heavy, light = (f"two H200s, {part} dense part: PIECEWISE adds" for part in ("heavy", "light"))
    served, longer = (f"two H200s, vLLM, 16 x {context}" for context in ("2,000", "32,000"))
    # Each run with its own no DCP.
    again = f"{served}, another run"
    pages = "with pages read in place, PIECEWISE"
    h200, study1 = "of what DCP adds on two H200s", "study 1, of what DCP adds"
    for pattern, name in (
        (r"PIECEWISE costs ([\d.]+) ms", f"{heavy} without"),
        (r"and (\d+) with DCP 2 and nothing", f"{heavy} with "),
        (r"below have, ([\d.]+) and", f"{light} without"),
        (r"below have, [\d.]+ and (\d+) \(", f"{light} with "),
        (r"Study 1's (\d+) ms", "study 1: DCP 2 adds"),
        (r"(\d+) % goes with PIECEWISE", f"{h200}, share of PIECEWISE"),
        (r"PIECEWISE and (\d+) % with the gather", f"{h200}, share of the gather"),
        (r"by the model (\d+) to", f"{study1}: share of PIECEWISE, least"),
        (r"by the model \d+ to (\d+) %", f"{study1}: share of PIECEWISE, most"),
        (r"% and (\d+) to \d+ %, its bytes", f"{study1}: share of the gather and its sync, least"),
        (r"to (\d+) %, its bytes", f"{study1}: share of the gather and its sync, most"),
        (r"bytes at most ([\d.]+) %", f"{study1}: the gather's bytes"),
        (r"leaves ([\d.]+)x the step", f"two H200s {pages}: over no DCP"),
        (r"by the model, ([\d.]+)x to", f"study 1 {pages}: over no DCP, least"),
        (r"by the model, [\d.]+x to ([\d.]+)x", f"study 1 {pages}: over no DCP, most"),
        (r"remove it:\*\* (\d+) % alone", f"{h200}, full graphs alone"),
        (r"in place (\d+) % alone", f"{h200}, pages read in place alone"),
        (r"both (\d+) %", f"{h200}, both"),
        (r"a step takes ([\d.]+) ms", "two H200s, 16 x 2,500: DCP 2, full graphs, paged, direct"),
        (r"ms, ([\d.]+) without DCP", "two H200s, 16 x 2,500: without DCP"),
        (r"one run .* that DCP 2 takes ([\d.]+) ms", f"{served}: DCP 2, full graphs, paged"),
        (r"2,000 tokens and ([\d.]+) at 32,000", f"{longer}: DCP 2, full graphs, paged"),
        (r"32,000, no DCP with vLLM's own kernel ([\d.]+) and", f"{served}: without DCP"),
        (r"32,000, no DCP with vLLM's own kernel [\d.]+ and ([\d.]+),", f"{longer}: without DCP"),
        (r"another run .* PIECEWISE takes (\d+) ms", f"{again}: DCP 2, study 1's gather"),
        (r"100 ms, no DCP ([\d.]+) with vLLM's own", f"{again}: without DCP, FLASH_ATTN"),
        (r"own kernel and ([\d.]+) with this lab's", f"{again}: without DCP, this lab's kernel"),
        (r"cache holds ([\d.]+) times", "two H200s, vLLM: KV cache with DCP 2"),
        (r"median error of ([\d.]+) %", "model: median error"),
        (r"its worst, ([\d.]+) %", "model: worst error"),
        (r"should take (\d+) to", f"study 1 {pages}: least"),
        (r"should take \d+ to (\d+) ms", f"study 1 {pages}: most"),
        (r"near (\d+) would prove", "study 1 with pages read in place, full graphs: most"),
    ):
        (value,) = (value for full, value in value_of.items() if full.startswith(name))
        said = re.search(pattern, text)[1]
        places = len(said.partition(".")[2])
        assert float(said) == round(value, places), name


def test_every_teach_notebook_ends_with_three_checked_exercises():
    """A task list of three under the last heading, and a cell that checks each answer."""
    for path in COMMITTED:
        nb = nbformat.read(path, as_version=4)
        if nb.metadata["dcp_lab"]["kind"] != "teach":
            continue
        text = [cell.source for cell in nb.cells if cell.cell_type == "markdown"][-1]
        _, _, asked = text.rpartition("## Exercises\n")
        assert asked and "\n## " not in asked, path.name
        assert re.findall(r"^(\d)\. ", asked, re.MULTILINE) == ["1", "2", "3"], path.name
        checks = re.findall(r"check_answer\(\s*(\d)", nb.cells[-1].source)
        assert checks == ["1", "2", "3"], path.name
