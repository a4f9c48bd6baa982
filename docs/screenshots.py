"""Makes the pictures of the report page: `make screenshots`, after `make demo`.

    python docs/screenshots.py FOLDER_OF_THE_DEMO FOLDER_FOR_THE_PICTURES

Chromium draws the report of a real run, headless, and a part of the window is kept.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from trimtab.report.page import write_report
from trimtab.report.settings import ReportSettings

WIDTH = 1100
# What is left out of each picture, and its height. Each is drawn light and dark.
PICTURES = {
    "report-top": (".facts", 830),
    "report-heat": ("header, .run > :not(.charts), .charts > :not(:has(.heat), .heat, .tools, .legend)", 610),
}


def main(demo: Path, out: Path) -> None:
    """Write the pictures into ``out``."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("Drawing a page needs Chromium or Chrome on the machine.")
    with tempfile.TemporaryDirectory() as folder:
        page = write_report(ReportSettings(runs=(demo / "records" / "gnmr",), out=Path(folder) / "report.html"))
        for name, (hidden, height) in PICTURES.items():
            style = f"<style>{hidden} {{ display: none !important }}</style></head>"
            text = page.read_text(encoding="utf-8").replace("</head>", style, 1)
            for theme, picture in (("light", out / f"{name}.png"), ("dark", out / f"{name}-dark.png")):
                part = Path(folder) / f"{picture.stem}.html"
                part.write_text(text.replace("<html ", f'<html data-theme="{theme}" ', 1), encoding="utf-8")
                words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
                words += ["--disable-dev-shm-usage", "--virtual-time-budget=5000"]
                words += [f"--window-size={WIDTH},{height}", f"--screenshot={picture}"]
                subprocess.run([chromium, *words, part.as_uri()], check=True, capture_output=True)
                print(picture, picture.stat().st_size)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]).absolute())
