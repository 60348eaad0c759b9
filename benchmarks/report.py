"""How long a report of a large tape takes to write and to open, and how large it is: `python -m benchmarks.report`.

The model is a chain of small layers; its backward has about as many nodes as `--nodes` says. The page is opened in
Chromium without a screen (Debian's `chromium` and `chromium-driver`, and `pip install -e '.[browser]'`). It has opened
once its script has run to the end and two frames were drawn.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import compiled_autograd as ca

_NODES_PER_LAYER = 5
_FRAMES = "requestAnimationFrame(() => requestAnimationFrame(() => arguments[0](performance.now())))"


def written(nodes: int, backend: str, path: Path) -> tuple[int, float]:
    """Write the report of a session of three backwards; gives the number of nodes, and the seconds that it took."""
    layers = max(1, nodes // _NODES_PER_LAYER)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(layers)))
    with ca.enable(backend=backend, on_miss="compile", cache_dir=False, tune=False) as session:
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(4, 8)).sum().backward()
    started = time.perf_counter()
    session.report(path)
    return len(session.graphs()[0].tape.calls), time.perf_counter() - started


def chromium_options() -> Any:
    """Of a headless Chromium that asks no network for anything."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1400,900",
        *("--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update"),
        "--disable-sync",
    ):
        options.add_argument(argument)
    return options


def opened(path: Path, times: int) -> list[float]:
    """Milliseconds from the beginning of the navigation, each in a new tab of one browser."""
    from selenium import webdriver

    options = chromium_options()
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        taken = []
        for _ in range(times):
            driver.switch_to.new_window("tab")
            driver.get(path.as_uri())
            taken.append(float(driver.execute_async_script(_FRAMES)))
            if driver.execute_script("return document.documentElement.dataset.ready") != "yes":
                sys.exit("the page's script did not run to its end")
        return taken
    finally:
        driver.quit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--times", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        nodes, seconds = written(arguments.nodes, arguments.backend, path)
        print(f"{nodes:,} nodes: written in {seconds:.1f} s, {path.stat().st_size / 1e6:.2f} MB")
        taken = opened(path, arguments.times)
        print(f"opened in {statistics.median(taken):.0f} ms (median of {len(taken)}, at most {max(taken):.0f})")


if __name__ == "__main__":
    main()
