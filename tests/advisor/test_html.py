"""The page of an advice: one file, no network, and what a browser makes of it."""

import re
import shutil
import subprocess

import pytest

from lightning_5d.advisor import advise, explain
from lightning_5d.advisor.html import page
from tests.advisor.cases import PAPER

BROWSER = next((b for b in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if b), None)


@pytest.fixture(scope="module")
def html() -> str:
    advice = advise("llama-13b", **PAPER, framework="aleph-alpha")
    shown = next(e for e in advice.best if "_pp" in e.layout)
    return page(advice, explain("llama-13b", shown.layout, **PAPER, framework="aleph-alpha"))


def test_it_stands_alone(html: str) -> None:
    assert not re.search(r"""(?:src|href)\s*=|https?://|@import|url\(""", html)
    assert html.count("<svg") == 2 and 'id="heat"' in html
    assert html.count("<tr class=") == 10


def test_names_cannot_break_it() -> None:
    model = {
        "name": "<script>alert(1)</script>",
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "intermediate_size": 512,
        "vocab_size": 1000,
    }
    text = page(advise(model, gpu="h100", num_gpus=8, seq_len=512, global_batch=64), None)
    assert "<script>alert" not in text and "&lt;script&gt;" in text


def test_nothing_fits_is_a_page_too() -> None:
    text = page(advise("llama3-405b", gpu="h100", num_gpus=8, seq_len=8192, global_batch=16), None)
    assert "nothing fits" in text and 'class="oom"' in text and 'id="heat"' not in text


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_browser_draws_it_and_sorts_the_table(html: str, tmp_path) -> None:
    probe = """
    const out = {};
    const column = 8, head = document.querySelectorAll("#layouts th")[column];
    const shown = () => [...document.querySelectorAll("#layouts tbody tr")].map(r => parseFloat(r.cells[column].textContent));
    head.click(); out.up = shown(); head.click(); out.down = shown();
    const limit = document.querySelector("#memory line").getBBox().x;
    out.over = [...document.querySelectorAll("#memory rect.memory")].some(r => r.getBBox().x + r.getBBox().width > limit + 1);
    out.bars = [...document.querySelectorAll("#memory rect.memory")].filter(r => r.getBoundingClientRect().width > 0).length;
    const svg = document.querySelector("#timeline").getBoundingClientRect();
    out.outside = [...document.querySelectorAll("#timeline rect.action")].filter(r => {
      const b = r.getBoundingClientRect(); return b.left < svg.left || b.right > svg.right + 1 || b.bottom > svg.bottom + 1;
    }).length;
    out.actions = document.querySelectorAll("#timeline rect.action").length;
    out.wider = document.documentElement.scrollWidth > window.innerWidth;
    document.title = JSON.stringify(out);
    """
    path = tmp_path / "page.html"
    path.write_text(html.replace("</body>", f"<script>{probe}</script></body>"), encoding="utf-8")
    picture = tmp_path / "page.png"
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={tmp_path}/profile",
        "--window-size=1300,1500",
    ]
    dom = subprocess.run([*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120, check=True).stdout
    import html as entities
    import json

    out = json.loads(entities.unescape(re.search(r"<title>(.*?)</title>", dom, re.S)[1]))
    assert out["up"] == sorted(out["up"]) and out["down"] == sorted(out["down"], reverse=True) and len(out["up"]) == 10
    assert out["over"] is False and out["bars"] >= 10 * 4
    assert out["actions"] > 20 and out["outside"] == 0 and out["wider"] is False
    subprocess.run([*command, f"--screenshot={picture}", path.as_uri()], capture_output=True, timeout=120, check=True)
    assert picture.stat().st_size > 30_000  # an empty page is smaller
