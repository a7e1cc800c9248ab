"""The README's table is today's. Those of CUDA and HIP are tested with their backends as well."""

import gpuinterop as gi
from gpuinterop.capabilities import DOMAIN, read_verified
from tests.readme_table import README, column


def test_the_table_says_what_the_host_can_do() -> None:
    table = gi.get_backend("host").device().capabilities
    cells = {str(cell): table.of(cell) for cell in DOMAIN}
    said = column("host")
    assert len(said) == 11
    assert said == {name: cells[name].support.value if cells[name] else "-" for name in said}


def test_the_table_says_what_runs_on_gpus_have_shown() -> None:
    for backend in ("cuda", "hip"):
        runs = read_verified(README.parent / "backends" / f"gpuinterop_{backend}" / "verified.toml")
        shown = {str(cell) for run in runs if run.platform == "linux" for cell in run.cells}
        said = column(backend)
        assert {name for name, word in said.items() if word == "supported"} == shown & said.keys()
