"""Moving the series to another upstream version, and checking that each of its prefixes stands on its own."""

from __future__ import annotations

from dataclasses import replace

from voltriton.patching.series import PatchError, Series, apply_one, move_one
from voltriton.patching.tree import Tree, sha256, write


def refresh(series: Series, tree: Tree) -> list[str]:
    """Rewrite line numbers of the patches and UPSTREAM for a tree without patches; returns what changed.

    A hunk may have moved but must fit in one place; otherwise the patch is named, for a person to change.
    """
    if tree.record():
        raise PatchError(
            f"{tree.root} carries patches: refresh needs a vLLM as published (voltriton patch revert)"
        )
    raw = {path: tree.read(path) for path in series.touched()}
    texts = {path: data.decode("utf-8") for path, data in raw.items()}
    changed: list[str] = []
    for patch in series.patches:
        moved = move_one(patch, texts)
        texts.update(apply_one(moved, texts))
        changed += _rewrite(series, patch.name, moved.render())
    upstream = series.upstream
    same = tree.version.split("+")[0] == upstream.version
    files = {path: _pins(upstream.files.get(path, ()) if same else (), sha256(raw[path])) for path in raw}
    version = tree.version.split("+")[0]
    return changed + _rewrite(series, "UPSTREAM", replace(upstream, version=version, files=files).render())


def _pins(known: tuple[str, ...], found: str) -> tuple[str, ...]:
    """One version may come in several packages (CPU, CUDA) whose files differ."""
    return known if found in known else (*known, found)


def _rewrite(series: Series, name: str, text: str) -> list[str]:
    path = series.folder / name
    if path.read_bytes() == text.encode():
        return []
    write(path, text.encode())
    return [name]


def prefix_problems(series: Series, files: dict[str, bytes]) -> list[str]:
    """Apply the patches one by one to published files and compile what each has touched."""
    texts = {path: files[path].decode("utf-8") for path in series.touched()}
    found: list[str] = []
    for patch in series.patches:
        try:
            after = apply_one(patch, texts)
        except PatchError as error:
            return [*found, str(error)]
        texts.update(after)
        for path, text in after.items():
            try:
                compile(text, path, "exec", dont_inherit=True)
            except SyntaxError as error:
                found.append(f"{patch.name}: {path} does not compile afterwards: {error}")
    return found
