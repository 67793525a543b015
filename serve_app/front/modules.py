"""Checks that the modules that `import_path` names exist where Ray will look for them on this machine.
Never imports one: importing a module can have any effect."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import all_suffixes
from importlib.util import find_spec
from pathlib import Path

from serve_app.front.arguments import Arguments
from serve_app.front.config_file import ConfigRefused, ServeConfig
from serve_app.front.preflight import BUILDER


def check_modules(config: ServeConfig, arguments: Arguments) -> None:
    """Raises ConfigRefused: an application's import_path names a module that does not exist; a line for each. With a
    runtime_env a missing module is allowed, because its files may come with it."""
    with _path_of_ray(arguments.app_dir):
        missing = list(_missing(config, arguments.brings_files))
    if missing:
        raise ConfigRefused("\n".join(missing))


@contextmanager
def _path_of_ray(app_dir: str) -> Iterator[None]:
    """Search as Ray does: `serve run` looks in `app_dir` first, and its workers in the current directory, which is not
    in the `sys.path` of a console script."""
    before = list(sys.path)
    sys.path[:0] = [str(Path(app_dir).absolute()), str(Path.cwd())]
    try:
        yield
    finally:
        sys.path[:] = before


def _missing(config: ServeConfig, brings_files: bool) -> Iterator[str]:
    for number, app in enumerate(config.applications):
        module, _, attribute = app["import_path"].replace(":", ".").rpartition(".")
        own = BUILDER.partition(":")[0]
        # With the attribute forgotten Ray would wait for ever. Other packages may export what a module of theirs is
        # called.
        ours = (module == own and attribute != "build") or f"{module}.{attribute}" == own
        if ours or not (brings_files or app.get("runtime_env") or _is_there(module)):
            what = f"{module} has no {attribute}" if ours else f"there is no module {module!r}"
            yield (
                f"{config.where('applications', number, 'import_path')}, application {app.get('name', 'default')}: "
                f"import_path: {what} (given: {app['import_path']!r}); this project's is {BUILDER}"
            )


def _is_there(module: str) -> bool:
    top, *rest = module.split(".")
    try:
        spec = find_spec(top) if top else None
    except ValueError:  # the module does not say where it comes from
        return True
    if spec is None:
        return False
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    for number, part in enumerate(rest, start=1):
        files = [place / f"{part}{suffix}" for place in places for suffix in all_suffixes()]
        places = [place / part for place in places if (place / part).is_dir()]
        if not places:
            return number == len(rest) and any(file.is_file() for file in files)
    return True
