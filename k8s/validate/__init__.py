"""Owns what is checked of the manifests without a cluster. `python -m k8s.validate` runs all of it.
Never changes a manifest, but for the built ones under `rendered/` when it is asked to."""
