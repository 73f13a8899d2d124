"""`import octavo` is quick: the heavy packages are imported when they are needed."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "tokenizers", "numpy", "huggingface_hub", "triton", "numba")


def loaded_after(statement: str) -> set[str]:
    """Which heavy packages a fresh Python has loaded after a statement."""
    script = f"{statement}\nimport sys\nprint(*[m for m in {HEAVY!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_import_octavo_loads_nothing_heavy() -> None:
    assert loaded_after("import octavo") == set()


def test_config_and_params_load_nothing_heavy() -> None:
    assert loaded_after("from octavo import EngineConfig, SamplingParams, OctavoError") == set()


def test_help_of_a_command_loads_nothing_heavy() -> None:
    run_help = (
        "import contextlib, io\nfrom octavo.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "    main([]), main(['generate', '--help'])"
    )
    assert loaded_after(run_help) == set()


def test_public_names_resolve_and_unknown_ones_do_not() -> None:
    import octavo

    assert set(octavo.__all__) <= set(dir(octavo))
    assert octavo.EngineConfig.__module__ == "octavo.config"
    assert not hasattr(octavo, "no_such_name")
