"""Owns the deployment on Kubernetes: manifests, dashboards, alerts, and the checks of them.
Never serves a request. Only `k8s.drain` runs in a pod."""
