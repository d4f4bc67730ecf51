"""Builds of images. Whole ones take minutes each, and run only where AGENTBOX_IMAGES is ``all``."""

from __future__ import annotations

import fnmatch
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract.serving import Serving
from support import images
from support.dockerd import Dockerd

from jupyter_agentbox.egress.presets import pip_environment
from jupyter_agentbox.storage.images import ImageStore, build, values
from jupyter_agentbox.storage.images.values import Recipe

pytestmark = pytest.mark.timeout(3600)

#: A cell of each part of an image, and what it prints.
DATASCIENCE = {
    "numpy": ("import numpy as np; print(np.linalg.det(np.eye(3) * 2).round())", "8.0"),
    "pandas": ("import pandas as pd; t = pd.DataFrame({'a': [1, 2, 3]}); print(t.a.sum())", "6"),
    "pyarrow": ("t.to_parquet('t.parquet'); print(pd.read_parquet('t.parquet').equals(t))", "True"),
    "openpyxl": ("t.to_excel('t.xlsx', index=False); print(pd.read_excel('t.xlsx').equals(t))", "True"),
    "scipy": ("from scipy import stats; print(stats.norm.cdf(0))", "0.5"),
    "sklearn": (
        "from sklearn.linear_model import LinearRegression as L; print(L().fit([[0], [1]], [0, 2]).coef_.round(3))",
        "[2.]",
    ),
    "plotly": ("import plotly.express as px; print(len(px.line(t, y='a').data))", "1"),
    "ipywidgets": ("import ipywidgets; print(ipywidgets.IntSlider(7).value)", "7"),
    "matplotlib": ("import matplotlib.pyplot as plt; plt.plot(t.a); plt.show(); print('drawn')", "drawn"),
}
LANGUAGES = {
    "bash": ("echo $((6 * 7)) in $(ls t.parquet)", "42 in t.parquet"),
    "r": (
        "library(ggplot2); t <- data.table::fread('a,b\\n1,x\\n2,y\\n'); d <- tempfile(fileext = '.png'); "
        "suppressMessages(ggsave(d, ggplot(t, aes(b, a)) + geom_col())); "
        "cat(nrow(readr::read_csv(I('a\\n1\\n'), show_col_types = FALSE)), jsonlite::toJSON(t$a), file.exists(d))",
        "1 [1,2] TRUE",
    ),
    "typescript": ("const f = (n: number): number => n * 7; console.log(f(6))", "42"),
    "javascript": ("console.log([1, 2, 3].map((n) => n * 2).join())", "2,4,6"),
}


def test_manuals_are_left_out_but_not_the_folders_that_packages_link_into(tmp_path: Path) -> None:
    recipe = read("base")
    command = build.make_command("mmdebstrap", recipe, "bookworm", tmp_path / "sources.list", tmp_path)
    left_out = [option.partition("path-exclude=")[2] for option in command if "path-exclude=" in option]

    def is_left_out(path: str) -> bool:
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in left_out)

    assert is_left_out("/usr/share/man/man1/java.1.gz")
    assert not is_left_out("/usr/share/man/man1")


def read(name: str) -> Recipe:
    return values.read_recipe(values.find_recipe(name))


if os.environ.get("AGENTBOX_IMAGES") == "all":

    def test_a_java_program_runs_and_sizes_itself_for_the_sandbox(tmp_path: Path) -> None:
        recipe = tmp_path / "java.toml"
        recipe.write_text('name = "java"\nfrom = "base"\ndebian = ["default-jdk-headless"]\n')
        store = ImageStore(tmp_path / "state")
        built = values.read_recipe(recipe)
        build.build(store, built, print, pip_environment=pip_environment(), cache=images.CACHE / "downloads")
        serving = Serving({}, store.state_dir, 9)
        try:
            serving.start()
            with serving.client.create(image="java", memory="2 GiB", cpus=1) as box:
                box.files.write(
                    "Size.java",
                    "public class Size { public static void main(String[] given) { Runtime own = Runtime.getRuntime();"
                    ' System.out.println(own.availableProcessors() + " " + (own.maxMemory() < 600_000_000L)); } }',
                )
                assert box.exec("java Size.java").stdout == "1 true\n"
        finally:
            serving.close()

    def make(recipe: Recipe, state: Path) -> str:
        store = ImageStore(state)
        image = build.build(store, recipe, print, pip_environment=pip_environment(), cache=images.CACHE / "downloads")
        assert store.list() == [image]
        return image.address

    @pytest.mark.parametrize("name", values.list_recipes())
    def test_two_builds_of_one_recipe_have_one_address(name: str, tmp_path: Path) -> None:
        assert make(read(name), tmp_path / "one") == make(read(name), tmp_path / "two")

    @pytest.fixture(params=["runsc", "docker"])
    def runtime(request: pytest.FixtureRequest, has_runsc: None) -> Iterator[dict[str, dict[str, object]]]:
        """Settings of a runtime, with its engine."""
        policy = {"runtime": request.param, "allowed_runtimes": [request.param]}
        if request.param != "docker":
            yield {"Policy": policy}
            return
        dockerd = Dockerd(Path(tempfile.mkdtemp(prefix="ab-d")))
        try:
            dockerd.start()
            yield {"Policy": policy, "DockerRuntime": {"host": dockerd.host}}
        finally:
            dockerd.close()

    @pytest.mark.parametrize("name", ["datascience", "all"])
    def test_what_an_image_has_works_in_sandboxes(name: str, runtime: dict[str, dict[str, object]]) -> None:
        image = images.build_ours(name)
        serving = Serving(runtime, image.store.state_dir, 9)
        try:
            serving.start()
            with serving.client.create(image=name, memory="2 GiB", disk="2 GiB") as box:
                info = box.refresh()
                assert info.image == image.image.address
                cells = [("python", *cell) for cell in DATASCIENCE.values()]
                for language, code, printed in (*cells, *((key, *LANGUAGES[key]) for key in info.languages[1:])):
                    result = box.run_code(code, language=language, timeout=240)
                    assert (result.status, result.stdout.strip()) == ("ok", printed), result
                    if "plt.show" in code:
                        assert "image/png" in result.displays[0].data
                assert {*info.languages} == {"python", "bash", *(LANGUAGES if name == "all" else ())}
        finally:
            serving.close()
