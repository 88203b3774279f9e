"""Make the screenshots of docs/view.md from real runs.

    python bench/screenshots.py --runs runs --out docs/figures

The runs are those of `tessera demo --medium all`; other folders of runs work too, and pages of runs
that are missing are left out. With `--all` every page is made in four variants, at 1280 x 800 and
at the width of a phone, light and dark, to be looked at.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.browser import Page, open_browser  # noqa: E402
from tests.view.served import serve  # noqa: E402


@dataclass(frozen=True)
class Shot:
    name: str
    address: str
    run: str | None
    ready: str
    """A condition of the page."""
    form: int | None = None
    """The form of the playground that is sent first, by its number."""
    fill: tuple[tuple[str, str], ...] = ()
    """Fields of the form and their texts."""


SETTLED = "[...document.querySelectorAll('.sample img')].every(i => i.complete)"
DONE = f"document.querySelector('.job')?.dataset.state === 'done' && {SETTLED}"
SHOTS = (
    Shot("view-runs", "/", None, "document.querySelector('tr[data-run]')"),
    Shot(
        "view-curves",
        "/run/images-vqgan/curves",
        "images-vqgan",
        "document.querySelector('.chart').dataset.points > 0",
    ),
    Shot("view-images", "/run/images-vqgan/samples", "images-vqgan", SETTLED),
    Shot(
        "view-audio",
        "/run/audio-codec/samples",
        "audio-codec",
        "document.querySelector('.audio .choice button')",
    ),
    Shot(
        "view-meshes",
        "/run/meshes-autoencoder/samples",
        "meshes-autoencoder",
        "[...document.querySelectorAll('canvas.mesh')].every(c => c.dataset.drawn)",
    ),
    Shot(
        "view-videos",
        "/run/videos-magvit2/samples",
        "videos-magvit2",
        "[...document.querySelectorAll('video')].every(v => v.readyState >= 2)",
    ),
    Shot("view-music", "/run/music-mulan/samples", "music-mulan", SETTLED),
    Shot(
        "view-playground",
        "/run/images-maskgit/playground",
        "images-maskgit",
        DONE,
        form=0,
        fill=(("textarea[name=prompt]", "a large red circle in the centre on white"),),
    ),
    Shot("view-round-trip", "/run/images-vqgan/playground", "images-vqgan", DONE, form=0),
    Shot(
        "view-mesh-playground",
        "/run/meshes-transformer/playground",
        "meshes-transformer",
        f"{DONE} && [...document.querySelectorAll('.job canvas.mesh')].every(c => c.dataset.drawn)",
        form=0,
    ),
    Shot(
        "view-codec-playground",
        "/run/audio-codec/playground",
        "audio-codec",
        f"{DONE} && !document.querySelector('.job .play:disabled')",
        form=0,
    ),
    Shot("view-index", "/run/music-mulan/playground", "music-mulan", DONE, form=1),
    Shot(
        "view-search",
        "/run/music-mulan/playground",
        "music-mulan",
        f"{DONE} && document.querySelectorAll('.job .play:enabled').length === 4",
        form=0,
        fill=(("input[name=query]", "a slow harp"), ("input[name=top]", "4")),
    ),
    Shot(
        "view-compare",
        "/compare/images-vqgan,images-maskgit",
        "images-maskgit",
        "document.querySelector('.difference') && "
        "document.querySelector('.chart').dataset.points > 0",
    ),
    Shot(
        "view-events",
        "/run/images-vqgan/events",
        "images-vqgan",
        "document.querySelector('.tab').children.length",
    ),
    Shot(
        "view-settings", "/run/images-vqgan/config", "images-vqgan", "document.querySelector('td')"
    ),
    Shot("view-card", "/run/images-vqgan/card", "images-vqgan", "document.querySelector('.card')"),
)
IN_DOCS = ("view-runs", "view-curves", "view-meshes", "view-music", "view-playground")
VARIANTS = {
    "": (1280, 800, False),
    "-dark": (1280, 800, True),
    "-phone": (390, 844, False),
    "-phone-dark": (390, 844, True),
}


def take(page: Page, url: str, shot: Shot, path: Path) -> None:
    page.go("about:blank")
    page.go(f"{url}#{shot.address}")
    page.wait("document.body.dataset.ready")
    if shot.form is not None:
        if page.evaluate("document.querySelectorAll('.side .choice button').length"):
            page.click(f".side .choice button:nth-of-type({shot.form + 1})")
        for field, text in shot.fill:
            page.fill(field, text)
        page.click(".form button.primary")
    page.wait(shot.ready)
    page.evaluate("scrollTo(0, 0)")
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    page.screenshot(path)
    width = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    problems = [*page.errors, *([f"{width} pixels too wide"] if width > 0 else [])]
    print(json.dumps({"file": path.name, "problems": problems}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    names = arguments.only or ([shot.name for shot in SHOTS] if arguments.all else IN_DOCS)
    with serve(arguments.runs) as site, open_browser() as browser:
        for shot in SHOTS:
            is_missing = shot.run is not None and not (arguments.runs / shot.run).exists()
            if shot.name not in names or is_missing:
                continue
            for suffix, (width, height, dark) in VARIANTS.items():
                if suffix and not arguments.all:
                    continue
                page = browser.open()
                page.set_view(width, height, dark=dark)
                take(page, site.url, shot, arguments.out / f"{shot.name}{suffix}.png")
                page.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
