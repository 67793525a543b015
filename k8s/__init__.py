"""Owns what Kubernetes needs of this project: manifests, dashboards, alerts, and the checks of them.
Never serves a request; `k8s.drain` alone runs in a pod."""
