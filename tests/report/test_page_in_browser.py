"""The page as a browser shows it: Debian's or anybody's Chromium, driven over chromedriver's HTTP protocol."""

import base64
import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimtab.report.page import write_report
from trimtab.report.settings import ReportSettings
from trimtab.trace import RunWriter, StepRow, UnitRow, open_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs Chromium and chromedriver on the machine"),
]

NASTY = "layers.0.<script>alert(1)</script>"


class Browser:
    """One window of a headless Chromium."""

    def __init__(self, width: int = 1300, height: int = 1000) -> None:
        self._process = subprocess.Popen(
            [str(DRIVER), "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        port = next(
            found[1] for line in self._process.stdout if (found := re.search(r"successfully on port (\d+)", line))
        )
        self._base = f"http://127.0.0.1:{port}/session"
        words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"]
        options = {"args": [*words, f"--window-size={width},{height}"], "binary": CHROMIUM}
        always = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        try:
            session = self._send("POST", "", {"capabilities": {"alwaysMatch": always}})
        except BaseException:
            self._end()
            raise
        self._base += "/" + session["sessionId"]

    def open(self, page: Path) -> None:
        self._send("POST", "/url", {"url": page.absolute().as_uri()})
        self.until("return document.documentElement.dataset.ready === 'yes'")

    def until(self, script: str, timeout_s: float = 60.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, (script, self.said())
            time.sleep(0.05)
        return value

    def run(self, script: str, *values: Any) -> Any:
        return self._send("POST", "/execute/sync", {"script": script, "args": values})

    def devtools(self, command: str, **params: Any) -> Any:
        return self._send("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def size(self, width: int, height: int) -> None:
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def hover(self, selector: str, x: float, y: float) -> None:
        """Bring the pointer to a place, counted from the corner of an element that is brought into view."""
        at = self.run(
            "const box = document.querySelector(arguments[0]);"
            "window.scrollTo({top: box.getBoundingClientRect().top + scrollY - 150, behavior: 'instant'});"
            "const r = box.getBoundingClientRect(); return [r.left, r.top]",
            selector,
        )
        move = {"type": "pointerMove", "duration": 0, "x": round(at[0] + x), "y": round(at[1] + y)}
        pointer = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [move]}
        self._send("POST", "/actions", {"actions": [pointer]})

    def press(self, selector: str, *keys: str) -> None:
        self.run("document.querySelector(arguments[0]).focus()", selector)
        strokes = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._send("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": strokes}]})

    def said(self) -> list[str]:
        return [entry["message"] for entry in self._send("POST", "/se/log", {"type": "browser"})]

    def picture(self, path: Path, whole: bool = False) -> None:
        shot = self.devtools("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self._send("DELETE", "", None)
        self._end()

    def _end(self) -> None:
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _send(self, method: str, path: str, data: Any) -> Any:
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(self._base + path, body, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()


def write_run(folder: Path, num_steps: int, num_units: int, seed: int = 0, names: tuple[str, ...] = ()) -> Path:
    """A made-up run in which a few units become risky now and then."""
    random = np.random.default_rng(seed)
    rest = [f"model.layers.{u // 7}.unit_{u % 7}" for u in range(num_units - len(names))]
    costs = {"low_saved_bytes": 68.0, "high_saved_bytes": 132.0, "flops": 1e5}
    units = [UnitRow(name=name, num_parameters=100, costs=costs) for name in (*names, *rest)]
    config = {
        "model": "Made<b>Up",
        "recipe": {"name": "saved-activations"},
        "policy": {"alpha": 4.0, "max_active": 0.2},
    }
    mean = random.lognormal(0, 1, num_units)
    with RunWriter(folder, config=config, units=units, versions={"trimtab": "0"}) as writer:
        for step in range(1, num_steps + 1):
            gnmr = random.lognormal(0, 0.3, num_units)
            gnmr[random.integers(0, num_units, max(1, num_units // 200))] *= 9
            risk = gnmr / 4
            active = risk > 1
            writer.write_step(
                StepRow(
                    step=step,
                    norms=gnmr * mean,
                    gnmr=gnmr,
                    delta=random.lognormal(0, 0.1, num_units),
                    risk=risk,
                    active=active,
                    lock=active * 3,
                    reason=active * 1,
                    alpha=4.0,
                    beta=3.0,
                    loss=2 + 3 * np.exp(-3 * step / num_steps) + random.normal(0, 0.05),
                    grad_norm=float(np.linalg.norm(gnmr * mean)),
                    elapsed_s=step * 0.25,
                )
            )
            if step % 400 == 0:
                writer.flush(60)  # what waits for the disk is bounded, and here nothing may be lost
        fault = {"fault": "stored copy", "start_step": num_steps // 3, "num_steps": 12, "factor": 50.0}
        writer.write_event("fault", num_steps // 3, units[-1].name, fault)
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Two records, and the page of both."""
    folder = tmp_path_factory.mktemp("two")
    a = write_run(folder / "a", 90, 14, names=(NASTY,))
    b = write_run(folder / "b", 120, 14, seed=1)
    return a, b, write_report(ReportSettings(runs=(a, b), out=folder / "report.html"))


def facts(browser: Browser) -> dict[str, str]:
    """What the tooltip of the first heat map says."""
    return browser.run(
        "return Object.fromEntries([['unit', document.querySelector('.heat .tip b').textContent],"
        "...[...document.querySelectorAll('.heat .tip span')]"
        ".map(s => [s.dataset.fact, s.lastChild.textContent])])"
    )


def colours(browser: Browser) -> int:
    """How many colours the first heat map has."""
    return browser.run(
        "const c = document.querySelector('.heat canvas');"
        "const d = new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer);"
        "return new Set(d).size"
    )


def check_against_record(shown: dict[str, str], record: Path) -> None:
    with open_run(record) as run:
        steps = run.steps()
    t = int(np.flatnonzero(steps.step == int(shown["step"].split(",")[0].split()[0]))[0])
    u = steps.units.index(shown["unit"])
    assert float(shown["norm"]) == steps.norms[t, u]
    for name, column in (("GNMR", steps.gnmr), ("Delta", steps.delta), ("risk", steps.risk)):
        assert np.float32(shown[name]) == column[t, u], name
    assert shown["active"].startswith("yes" if steps.active[t, u] else "no")
    assert shown["lock"] == ("3 more steps" if steps.active[t, u] else "none")
    assert ("alpha" in shown.get("reason", "")) == bool(steps.active[t, u])


def test_the_page_draws_without_a_word_on_the_console(browser, two):
    browser.open(two[2])
    browser.run("return window.trimtabReport.drawAll()")
    assert browser.run("return document.querySelectorAll('.heat').length") == 2
    assert browser.run("return document.querySelectorAll('.curve[d^=M]').length") >= 8
    assert colours(browser) > 40
    assert browser.said() == []


def test_notices_are_drawn_faintly_beside_the_alarms_on_the_time_line(browser, tmp_path):
    folder = write_run(tmp_path / "run", 40, 7)
    common = {"first_step": 9, "mechanism": "attention", "places": ["layer_0"], "value": 1.0, "reference": 0.5}
    with RunWriter(folder, config={}, units=[UnitRow(name="u")], start_step=40) as writer:
        writer.write_step(StepRow(step=41, norms=[1.0]))
        for kind, step, metric in (("notice", 10, "residual"), ("alarm", 20, "d2_entropy"), ("notice", 30, "residual")):
            said = {"step": step, "monitor": "m", "metric": metric, "sentence": f"{metric} has moved.", "level": kind}
            writer.write_event(kind, step, "layer_0", common | said)
    browser.open(write_report(ReportSettings(runs=(folder,), out=tmp_path / "report.html")))
    browser.run("return window.trimtabReport.drawAll()")
    timeline = "const line = [...document.querySelectorAll('figure')].find(f => f.textContent.includes('m/residual'));"
    count = "return ['.alarm-span', '.notice-span'].map(s => line.querySelectorAll(s).length)"
    assert browser.run(timeline + count) == [1, 2]
    assert "notice, which is no alarm" in browser.run(timeline + "return line.textContent")
    # The charts above mark what is an alarm, and nothing else.
    assert browser.run("return document.querySelectorAll('figure .notice-span').length") == 2
    assert browser.said() == []


def write_learning(folder: Path, given: bool) -> Path:
    """A run with steps 21 to 39 missing whose policy learns up to step 10; the loss is given, or not."""
    config = {"policy": {"alpha": 4.0, "max_active": 1, "act_from_step": 10}, "monitors": ["m"]}
    with RunWriter(folder, config=config, units=[UnitRow(name="layers.0.q"), UnitRow(name="layers.0.k")]) as writer:
        for step in (*range(1, 21), *range(40, 61)):
            risk = [0.0, 0.0] if step <= 10 else [0.2, 0.5]
            row = StepRow(step=step, norms=[1.0, 2.0], risk=risk, loss=1.0 if given else None, grad_norm=3.0)
            writer.write_step(row)
    return folder


def test_no_curve_crosses_steps_that_are_not_in_the_record(browser, tmp_path):
    record = write_learning(tmp_path / "run", given=True)
    browser.open(write_report(ReportSettings(runs=(record,), out=tmp_path / "report.html")))
    curves = browser.run("return [...document.querySelectorAll('.charts .curve')].map(c => c.getAttribute('d'))")
    assert len(curves) == 3
    assert all(curve.count("M") == 2 for curve in curves)
    assert browser.run("return document.querySelectorAll('.charts rect.gap-span').length") == 2 + 3
    assert browser.said() == []


def test_a_loss_that_was_not_given_is_a_sentence_and_no_chart(browser, tmp_path):
    record = write_learning(tmp_path / "run", given=False)
    browser.open(write_report(ReportSettings(runs=(record,), out=tmp_path / "report.html")))
    text = browser.run("return document.querySelector('.charts').textContent")
    assert "call guard.observe(loss=loss)" in text
    assert browser.run("return document.querySelectorAll('.lost').length") == 0
    titles = browser.run("return [...document.querySelectorAll('figcaption b')].map(b => b.textContent)")
    assert titles == ["Gradient norm before clipping, logarithmic", "Units on the recovery path in the next step"]


def test_steps_in_which_the_policy_only_learns_do_not_look_healthy(browser, tmp_path):
    record = write_learning(tmp_path / "run", given=True)
    browser.open(write_report(ReportSettings(runs=(record,), out=tmp_path / "report.html")))
    assert "the policy only learns up to step 10" in browser.run("return document.querySelector('.legend').textContent")
    browser.press(".heat", "\ue011", "\ue011")
    assert facts(browser)["risk"] == "not judged: the policy only learns"
    assert colours(browser) >= 4  # not recorded, not judged, and two risks
    browser.press(".heat", "\ue010")
    assert facts(browser)["risk"] in ("0.2", "0.5")


def test_names_from_the_record_stay_text(browser, two):
    browser.open(two[2])
    assert browser.run("return document.querySelectorAll('script:not([type])').length") == 1
    assert browser.run("return document.querySelectorAll('main script, main b b').length") == 0
    browser.press(".heat", "\ue011", "\ue011", *["\ue013"] * 20)
    assert facts(browser)["unit"] == NASTY
    assert "Made<b>Up" in browser.run("return document.querySelector('.facts').textContent")
    assert browser.said() == []


def test_hovering_shows_what_the_record_holds(browser, two):
    browser.open(two[2])
    for x, y in ((200, 40), (640, 120), (900, 7), (1100, 210)):
        browser.hover(".heat", x, y)
        check_against_record(facts(browser), two[0])


def test_the_arrow_keys_move_the_same_tooltip(browser, two):
    browser.open(two[2])
    browser.press(".heat", "\ue014")
    before = facts(browser)
    browser.press(".heat", "\ue014", "\ue015")
    after = facts(browser)
    check_against_record(after, two[0])
    assert int(after["step"]) == int(before["step"]) + 1
    assert after["unit"] != before["unit"]
    assert after["unit"] in browser.run("return document.querySelector('[role=status]').textContent")
    browser.press(".heat", "+", "+")
    browser.press(".heat", "\ue012")
    check_against_record(facts(browser), two[0])
    browser.press(".heat", "\ue00c")
    assert browser.run("return document.querySelector('.heat .tip').hidden")


def test_runs_are_compared_on_common_axes(browser, two):
    browser.open(two[2])
    assert browser.run("return document.querySelectorAll('#overlay .curve[d^=M]').length") == 2
    assert browser.run("return document.querySelectorAll('#comparison tbody tr').length") == 2
    assert browser.run("return new Set([...document.querySelectorAll('#overlay .curve')]"
                       ".map(c => c.getAttribute('stroke-dasharray'))).size") == 2  # fmt: skip
    label = browser.run("return document.querySelector('#overlay svg[role=img]').getAttribute('aria-label')")
    assert label.startswith("Loss of all runs, steps 1 to 120")


def test_dark_follows_the_system_and_the_button(browser, two):
    background = "return getComputedStyle(document.body).backgroundColor"
    scheme = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.open(two[2])
    light = browser.run(background)
    browser.devtools("Emulation.setEmulatedMedia", features=scheme)
    try:
        dark = browser.run(background)
    finally:
        browser.devtools("Emulation.setEmulatedMedia", features=[])
    assert light == "rgb(255, 255, 255)"
    assert dark == "rgb(20, 22, 26)"
    browser.run("const b = document.getElementById('theme'); b.click(); b.click()")
    assert browser.run(background) == dark
    browser.run("document.getElementById('theme').click()")
    assert browser.run(background) == light


def test_a_narrow_screen_needs_no_sideways_scrolling(browser, two):
    browser.size(400, 800)
    try:
        browser.open(two[2])
        browser.run("return window.trimtabReport.drawAll()")
        assert browser.run("return document.documentElement.scrollWidth") <= 400
        assert colours(browser) > 40
        browser.hover(".heat", 200, 60)
        check_against_record(facts(browser), two[0])
        assert browser.run("const r = document.querySelector('.heat .tip').getBoundingClientRect();"
                           "return r.left >= 0 && r.right <= 400")  # fmt: skip
    finally:
        browser.devtools("Emulation.clearDeviceMetricsOverride")


def test_a_large_run_is_drawn_soon_and_tells_the_riskiest_step_of_a_column(browser, tmp_path):
    record = write_run(tmp_path / "large", 2000, 500)
    page = write_report(ReportSettings(runs=(record,), out=tmp_path / "large.html"))
    assert page.stat().st_size < 15 * 2**20
    browser.open(page)
    assert colours(browser) > 40
    browser.hover(".heat", 500, 250)
    shown = facts(browser)
    check_against_record(shown, record)
    step, begin, end = (int(n.replace(",", "")) for n in re.findall(r"[\d,]*\d", shown["step"]))
    with open_run(record) as run:
        steps = run.steps()
    u = steps.units.index(shown["unit"])
    assert steps.risk[step - 1, u] == steps.risk[begin - 1 : end, u].max()
    assert browser.said() == []
