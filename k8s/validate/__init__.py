"""Owns the checks of the manifests that need no cluster. `python -m k8s.validate` runs all of them.
Never changes a manifest, except for the built ones under `rendered/` with `--render`."""
