"""The page in a real browser: Debian's Chromium without a window, which clicks and looks.

The file is left out where Chromium is not installed (`conftest.py`).
"""

from __future__ import annotations

import base64
import json
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest

from bench.browser import Browser, Page, open_browser
from tessera import Image
from tessera.modalities import recipes
from tessera.modalities.audio.media import Audio
from tests.cli_runner import tessera
from tests.view.endless_worker import ENDLESS
from tests.view.served import VARIANTS, Served, serve, train_tiny

TABS = ("curves", "samples", "playground", "events", "config", "card")


@pytest.fixture(scope="module")
def all_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser") / "runs"
    for name in recipes():
        train_tiny(folder, name)
    return folder


@pytest.fixture(scope="module")
def site(all_runs: Path) -> Iterator[Served]:
    with serve(all_runs) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser(
        "--autoplay-policy=no-user-gesture-required",
        "--use-fake-device-for-media-stream",  # a microphone that hears beeps
        "--use-fake-ui-for-media-stream",
    ) as one:
        yield one


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    one = browser.open()
    one.set_view(1280, 800)
    yield one
    assert one.errors == []
    one.close()


def show(page: Page, site: Served, address: str) -> None:
    """Open a part of the page and wait until it is there."""
    page.go("about:blank")
    page.go(f"{site.url}#{address}")
    page.wait("document.body.dataset.ready && document.querySelector('.view').children.length")


def run_job(page: Page) -> str:
    """Send the form and wait for the end of its job; return the state."""
    before = page.evaluate("document.querySelectorAll('.job').length")
    page.click(".form button.primary")
    page.wait(f"document.querySelectorAll('.job').length > {before}")
    ends = "['done', 'failed', 'cancelled']"
    return page.wait(
        f"(state => {ends}.includes(state) && state)(document.querySelector('.job').dataset.state)"
    )


def copied(page: Page, label: str) -> str:
    """Click a button that copies, and return what was copied."""
    button = f"[...document.querySelectorAll('.job button')].find(b => b.textContent === '{label}')"
    page.evaluate(f"document.querySelector('#copy')?.removeAttribute('id'); {button}.id = 'copy'")
    page.click("#copy")
    return page.wait("document.querySelector('#copy').dataset.copied")


# The number of pixels of a canvas that are not transparent.
PAINTED = """(() => { const c = document.querySelector('CANVAS');
    const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
    let count = 0; for (let i = 3; i < d.length; i += 4) count += d[i] > 0; return count; })()"""
MESH_PIXELS = PAINTED.replace("CANVAS", "canvas.mesh")
FETCH = """fetch(document.querySelector({selector}).src).then(r => r.arrayBuffer()).then(
    b => btoa(String.fromCharCode(...new Uint8Array(b))))"""


def fetch(page: Page, selector: str) -> bytes:
    return base64.b64decode(page.evaluate(FETCH.format(selector=json.dumps(selector))))


# ---- runs, curves and samples


def test_every_kind_of_run_opens_without_a_console_error(page, site, all_runs):
    show(page, site, "/")
    names = sorted(path.name for path in all_runs.iterdir())
    shown = page.evaluate("[...document.querySelectorAll('tr[data-run]')].map(r => r.dataset.run)")
    assert sorted(shown) == names and len(names) == len(recipes()) + len(VARIANTS)
    rows = {row["id"]: row for row in site.get("/api/runs").json["runs"]}
    without_value = [name for name in names if rows[name]["value"] is None]
    assert set(without_value) <= set(VARIANTS)  # Recipe.metric exists
    row = page.text("tr[data-run='audio-soundstorm']")
    assert "semantic: audio-semantic" in row and "tokenizer: audio-codec" in row
    for name in names:
        for tab in TABS:
            page.evaluate(f"location.hash = '#/run/{name}/{tab}'")
            here = f"document.querySelector('.tab[data-tab={tab}]')"
            page.wait(
                f"document.querySelector('h1').innerText === '{name}' && {here}.children.length"
            )
            assert page.evaluate("document.querySelectorAll('.error').length") == 0, (name, tab)
            if tab == "samples":
                media = "img, video, canvas"
                page.wait("document.querySelectorAll('.sample').length === 2")
                page.wait(f"{here}.querySelector('{media}')")
            if tab == "playground":
                page.wait("document.querySelector('.form button.primary')")
    assert page.errors == []
    assert all(url.startswith((site.url, "blob:", "data:", "about:")) for url in page.requests)


def test_no_page_is_wider_than_a_phone(page, site):
    page.set_view(390, 844, dark=True)
    for address in ("/", "/run/images-maskgit/curves", "/run/audio-codec/samples",
                    "/run/images-maskgit/playground", "/run/images-vqgan/config"):  # fmt: skip
        show(page, site, address)
        page.wait("document.querySelector('.view').innerText.length > 20")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, address


def test_runs_are_filtered_and_compared(page, site):
    show(page, site, "/")
    page.fill("input[type=search]", "image generator")
    page.fill("input[type=search]", "images-vqgan")
    page.wait("document.querySelectorAll('tr[data-run]').length === 2")
    page.click("tr[data-run='images-vqgan'] input")
    page.fill("input[type=search]", "vqgan-32")
    page.click("tr[data-run='vqgan-32'] input")
    page.click("thead th:nth-child(2) button")  # by name, which is ascending first
    page.fill("input[type=search]", "")
    names = "[...document.querySelectorAll('tr[data-run]')].map(row => row.dataset.run)"
    shown = page.evaluate(names)
    assert len(shown) > 2 and shown == sorted(shown)
    page.click("thead th:nth-child(2) button")
    assert page.evaluate(names) == sorted(shown, reverse=True)
    page.click(".bar button")
    page.wait("location.hash.startsWith('#/compare/') && document.querySelector('.difference')")
    assert "data.size" in page.text(".difference")
    legend = page.wait("document.querySelector('[data-chart=psnr] .u-legend')?.innerText")
    assert "images-vqgan" in legend and "vqgan-32" in legend


def test_a_curve_follows_a_run_that_trains_meanwhile(page, all_runs, tmp_path):
    command = [sys.executable, "-m", "tessera", "train", "images-vqgan", "--preset", "tiny"]
    command += ["--steps", "1000000", "--log-every", "1", "--validate-every", "1000000", "--out"]
    with serve(tmp_path) as site:
        show(page, site, "/")
        page.wait("document.querySelector('.empty')")
        process = subprocess.Popen(
            [*command, str(tmp_path / "live")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        page.wait("document.querySelector('tr[data-run=live] .badge.training')")
        page.evaluate("window.sameDocument = true")
        page.click("tr[data-run=live] a.run-name")
        last = "Number(document.querySelector('[data-chart=\"model/loss\"]').dataset.lastStep)"
        first = page.wait(f"{last} || 0")
        page.wait(f"{last} > {first}")
        process.send_signal(signal.SIGINT)
        page.wait("document.querySelector('.run-header .badge.stopped')")
        process.wait()
        [*_, end] = (tmp_path / "live" / "metrics.jsonl").read_text().splitlines()
        page.wait(f"{last} === {json.loads(end)['step']}")
        assert page.evaluate("window.sameDocument")  # nothing was loaded again


def test_the_slider_shows_the_samples_of_each_step(page, site):
    show(page, site, "/run/images-vqgan/samples")
    page.wait("document.querySelector('.grid').dataset.step === '4'")
    image = "document.querySelector('.sample img')"
    page.wait(f"{image}.complete && {image}.naturalWidth")
    last = page.evaluate(f"{image}.src")
    assert page.evaluate(f"getComputedStyle({image}).imageRendering") == "pixelated"
    assert page.evaluate(f"{image}.clientWidth % {image}.naturalWidth") == 0
    assert page.evaluate("document.querySelector('.codebook').dataset.step") == "4"
    page.click("button[aria-label='Earlier step']")
    page.wait("document.querySelector('.grid').dataset.step === '2'")
    assert page.evaluate(f"{image}.src") != last
    assert page.evaluate("document.querySelector('.codebook').dataset.step") == "2"
    assert page.evaluate(PAINTED.replace("CANVAS", ".codebook .histogram")) > 100


def test_a_sound_plays_and_switches_to_its_original(page, site):
    show(page, site, "/run/audio-codec/samples")
    page.wait("document.querySelector('.audio .choice button[aria-pressed=true]')")
    player = "document.querySelector('.audio')"
    assert page.text(".audio .choice [aria-pressed=true]") == "Reconstruction"
    page.click(".audio .play")
    page.wait(f"{player}.dataset.played === 'true'")
    page.click(".audio .surface")  # the middle of the recording
    page.wait(f"Number({player}.dataset.time) > 0.02")
    page.click(".audio .choice button")
    assert page.wait("document.querySelector('.audio [aria-pressed=true]').innerText") == "Original"
    drawn = """(() => { const c = document.querySelector('.wave');
        const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        return new Set(d).size; })()"""
    assert page.evaluate(drawn) > 20


def test_videos_play_in_step(page, site):
    show(page, site, "/run/videos-magvit2/samples")
    videos = "[...document.querySelectorAll('video')]"
    page.wait(f"{videos}.length === 2 && {videos}.every(v => !v.paused && v.currentTime > 0)")


def test_a_mesh_is_drawn_and_turns(page, site):
    show(page, site, "/run/meshes-autoencoder/samples")
    page.wait("document.querySelector('canvas.mesh').dataset.drawn")
    surface = page.evaluate(MESH_PIXELS)
    assert surface > 500
    url = "document.querySelector('canvas.mesh').toDataURL()"
    before = page.evaluate(url)
    page.click(".controls label:nth-of-type(2) input")
    wire = page.evaluate(MESH_PIXELS)
    assert 0 < wire < surface
    page.click(".controls label:nth-of-type(1) input")
    page.wait(f"{url} !== {json.dumps(before)}")


def test_texts_of_a_run_are_never_html(page, all_runs, tmp_path):
    name = "<img src=x onerror=window.hacked=1>"
    shutil.copytree(all_runs / "images-vqgan", tmp_path / name)
    samples = tmp_path / name / "samples" / "000004"
    html = "<script>window.hacked=2</script><b>bold</b>"
    settings = {"step": 4, "captions": [html, html]}
    (samples / "settings.json").write_text(json.dumps(settings))
    (tmp_path / name / "README.md").write_text(f"# {html}\n\n{name}\n\n| a |\n|---|\n| {html} |\n")
    (tmp_path / name / "alarms.jsonl").write_text(json.dumps({"step": 1, "alarm": html}) + "\n")
    (tmp_path / name / "rejected.jsonl").write_text(
        json.dumps({"example": f"{name}.png", "reason": html}) + "\n"
    )
    with serve(tmp_path) as site:
        show(page, site, "/")
        assert name in page.text("tr[data-run]")
        for tab in ("samples", "events", "card", "config", "playground"):
            show(page, site, f"/run/{quote(name, safe='')}/{tab}")
            page.wait(f"document.querySelector('.tab[data-tab={tab}]').children.length")
            if tab in ("samples", "events", "card"):
                page.wait("document.querySelector('.tab').innerText.includes('<b>bold</b>')")
            assert page.evaluate("window.hacked") is None
            assert page.evaluate("document.querySelectorAll('main b, main script').length") == 0


def test_a_damaged_run_says_what_is_wrong(page, all_runs, tmp_path):
    shutil.copytree(all_runs / "images-vqgan", tmp_path / "damaged")
    (tmp_path / "damaged" / "config.json").write_text("{")
    with serve(tmp_path) as site:
        show(page, site, "/")
        assert "not valid JSON" in page.text("tr[data-run=damaged]")
        show(page, site, "/run/damaged")
        assert "not valid JSON" in page.text(".problem-box")


# ---- playground


def test_a_prompt_becomes_the_image_of_the_command(page, site, tmp_path):
    show(page, site, "/run/images-maskgit/playground")
    page.fill("textarea[name=prompt]", "a red circle")
    page.fill("input[name=seed]", "5")
    page.fill("input[name=count]", "1")
    assert run_job(page) == "done"
    page.wait("document.querySelector('.job .sample img').naturalWidth")
    shown = fetch(page, ".job .sample img")
    command = copied(page, "Copy as command")
    assert "--prompt 'a red circle'" in command and "--seed 5" in command
    _, *arguments = shlex.split(command)
    assert tessera(*arguments, "--out", tmp_path / "out").code == 0
    assert (tmp_path / "out" / "0000.png").read_bytes() == shown
    assert "Generator.load(" in copied(page, "Copy as Python")
    links = "[...document.querySelectorAll('.job .sample a[download]')].map(a => a.download)"
    assert any(name.endswith("0000.png") for name in page.evaluate(links))
    show(page, site, "/run/images-maskgit/playground")  # from the folder, after a reload
    page.click(".made summary")
    page.wait("document.querySelector('.made .sample img')?.naturalWidth")
    assert fetch(page, ".made .sample img") == shown


def test_a_painted_part_of_an_image_is_generated_again(page, site, tmp_path):
    pixels = np.full((16, 16, 3), 90, np.uint8)
    show(page, site, "/run/images-maskgit/playground")
    page.fill("input[name=count]", "1")
    page.choose_file("input[name=data]", Image(pixels).save(tmp_path / "grey.png"))
    page.wait("document.querySelector('canvas.brush')?.width === 16")
    page.click("canvas.brush")
    page.wait("document.querySelector('canvas.brush').dataset.painted")
    assert run_job(page) == "done"
    command = copied(page, "Copy as command")
    mask = Path(shlex.split(command)[shlex.split(command).index("--mask") + 1])
    white = Image.load(site.view.library.folders[0] / mask).pixels > 127
    assert 0 < white.mean() < 0.5


def test_a_round_trip_shows_tokens_and_compression(page, site, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (16, 16, 3), np.uint8)
    show(page, site, "/run/images-vqgan/playground")
    page.choose_file("input[name=data]", Image(pixels).save(tmp_path / "noise.png"))
    assert run_job(page) == "done"
    text = page.text(".job .tokens")
    assert "4 × 4" in text and "768 bytes" in text and "64 ×" in text
    page.wait("document.querySelector('.job .histogram')")


def test_music_is_found_and_can_be_played(page, site):
    show(page, site, "/run/music-mulan/playground")
    page.evaluate("document.querySelectorAll('.side .choice button')[1].click()")
    assert run_job(page) == "done"
    show(page, site, "/run/music-mulan/playground")
    page.fill("input[name=query]", "a slow harp")
    page.fill("input[name=top]", "2")
    assert run_job(page) == "done"
    page.wait("document.querySelectorAll('.job .audio').length === 2")
    page.click(".job .audio .play")
    page.wait("document.querySelector('.job .audio').dataset.played === 'true'")


def test_small_images_of_another_run_are_enlarged(page, site):
    show(page, site, "/run/images-maskgit-superres/playground")
    page.fill("input[name=count]", "1")
    page.evaluate("document.querySelector('select[name=run]').value = 'images-maskgit'")
    assert run_job(page) == "done", page.text(".job")
    page.wait("document.querySelector('.job .sample img').naturalWidth === 32")


def test_an_uploaded_image_is_enlarged(page, site, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (16, 16, 3), np.uint8)
    show(page, site, "/run/images-maskgit-superres/playground")
    page.fill("input[name=count]", "1")
    page.choose_file("input[name=data]", Image(pixels).save(tmp_path / "small.png"))
    assert run_job(page) == "done", page.text(".job")
    page.wait("document.querySelector('.job .sample img').naturalWidth === 32")


def test_an_uploaded_mesh_is_completed(page, site, tmp_path):
    show(page, site, "/run/meshes-transformer/playground")
    page.fill("input[name=count]", "1")
    page.choose_file("input[name=data]", write_plane(tmp_path / "plane.obj"))
    assert run_job(page) == "done", page.text(".job")
    page.wait("document.querySelector('.job canvas.mesh').dataset.drawn")
    assert "--data" in copied(page, "Copy as command")


def write_plane(path: Path) -> Path:
    path.write_text("v 0 0 0\nv 1 0 0\nv 1 1 0\nv 0 1 0\nf 1 2 3\nf 1 3 4\n")
    return path


def test_a_recording_is_spoken_in_another_voice(page, site, tmp_path):
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, (1, 16_000)).astype(np.float32)
    show(page, site, "/run/audio-soundstorm/playground")
    page.fill("input[name=count]", "1")
    page.choose_file("input[name=prompt_audio]", Audio(noise, 16_000).write(tmp_path / "voice.wav"))
    record = "[data-field=like] button.record"
    page.click(record)
    page.wait(f"Number(document.querySelector('{record}').dataset.seconds) > 2")
    page.click(record)
    page.wait("document.querySelector('[data-field=like] .preview').innerText")
    assert run_job(page) == "done", page.text(".job")
    page.wait("document.querySelector('.job .sample canvas')")
    command = shlex.split(copied(page, "Copy as command"))
    assert "--prompt-audio" in command
    recording = Audio.load(command[command.index("--like") + 1])
    assert recording.seconds > 1 and np.abs(recording.samples).max() > 0.05


def test_many_waiting_jobs_leave_the_page_usable(page, site):
    """A browser opens six connections to a server; each job had one of its own before."""
    show(page, site, "/run/images-maskgit/playground")
    page.fill("input[name=count]", "1")
    page.evaluate("document.querySelector('.form details').open = true")
    page.fill("input[name=decoding_steps]", str(ENDLESS))
    for count in range(1, 8):
        page.click(".form button.primary")
        page.wait(f"document.querySelectorAll('.job').length === {count}")
    for number in range(7):
        page.click(f".job:nth-child({number + 1}) .job-head button")
    page.wait("document.querySelectorAll('.job[data-state=cancelled]').length === 7")


SET_HIDDEN = """(() => {
    Object.defineProperty(document, "hidden", { value: HIDDEN, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
})()"""
COUNT_STREAMS = """(() => {
    window.streams = [];
    const Original = EventSource;
    window.EventSource = function (url) { return streams[streams.push(new Original(url)) - 1]; };
})()"""


def test_a_hidden_page_has_no_stream_of_events(page, site):
    show(page, site, "/")
    page.evaluate(COUNT_STREAMS)
    page.evaluate(SET_HIDDEN.replace("HIDDEN", "true"))
    page.evaluate(SET_HIDDEN.replace("HIDDEN", "false"))
    assert page.evaluate("streams.length") == 1
    page.wait("streams[0].readyState === 1")
    page.evaluate(SET_HIDDEN.replace("HIDDEN", "true"))
    assert page.evaluate("streams.map(stream => stream.readyState)") == [2]  # closed


def test_a_failing_job_gives_its_sentence_and_a_long_one_is_cancelled(page, site):
    show(page, site, "/run/images-maskgit/playground")
    page.evaluate("document.querySelector('.form details').open = true")
    page.evaluate("document.querySelector('select[name=order]').value = 'critic'")
    assert run_job(page) == "failed"
    assert "no critic" in page.text(".job .error")
    page.evaluate("document.querySelector('select[name=order]').value = 'halton'")
    page.fill("input[name=decoding_steps]", str(ENDLESS))
    page.click(".form button.primary")
    page.wait("document.querySelector('.job').dataset.state === 'running'")
    page.wait("document.querySelector('.job .emerging').naturalWidth")
    assert f"of {ENDLESS}" in page.text(".job .job-state")
    page.click(".job .job-head button")
    page.wait("document.querySelector('.job').dataset.state === 'cancelled'")


# ---- reports


@pytest.mark.parametrize("name", ["images-vqgan", "audio-codec", "meshes-autoencoder"])
def test_a_report_opens_from_disk_without_network(page, all_runs, tmp_path, name):
    path = tmp_path / "report.html"
    assert tessera("view", all_runs / name, "--export", path).code == 0
    assert path.stat().st_size < 10_000_000
    page.call(
        "Network.emulateNetworkConditions",
        offline=True,
        latency=0,
        downloadThroughput=0,
        uploadThroughput=0,
    )
    page.go(path.as_uri())
    page.wait("document.body.dataset.ready")
    page.wait("document.querySelector('[data-chart=\"model/loss\"]').dataset.points === '4'")
    page.wait("document.querySelectorAll('.sample').length === 2")
    if name == "images-vqgan":
        page.wait("document.querySelector('.sample img').naturalWidth")
    elif name == "audio-codec":
        page.click(".audio .play")
        page.wait("document.querySelector('.audio').dataset.played === 'true'")
    else:
        page.wait("document.querySelector('canvas.mesh').dataset.drawn")
        assert page.evaluate(MESH_PIXELS) > 500
    assert {url.partition(":")[0] for url in page.requests} <= {"file", "data", "blob", "about"}
