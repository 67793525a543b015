"""Builds the application of `serve run config.yaml`: an ingress deployment over an engine deployment for each model,
and with several ingress replicas a store of responses that they share.
Never does work at import or build time; models are read in the replicas that need them."""

# No `from __future__ import annotations` here: Ray reads the builder's annotation to validate `args:`.
from ray import serve
from ray.serve import Application

from serve_app.replicas.deployment import EngineReplica, IngressReplica
from serve_app.routing.router import router_config
from serve_app.scaling.policy import deployment_options
from serve_app.settings.application import CONTROL_CALLS, AppSettings
from serve_app.store.shared import StoreReplica
from serve_app.tracing.export import check_exporter

# Serve kills a replica that still drains this long after its drain timeout, at which the ingress ends its streams; see
# `replicas.stopping`.
_DRAIN_MARGIN_S = 15
_STORE_SHUTDOWN_S = 2
_STARTS = 3
"""How many starts of each first replica may fail before the application is given up, as by Serve's default."""
_ANY_NUMBER = 2**31 - 1


def build(args: AppSettings) -> Application:
    """Build the application. config.yaml names it by `import_path: serve_app.app:build`; `args` are its settings."""
    check_exporter(args.tracing)  # here, so that whoever starts the server sees the error
    shutdown_s = args.drain_timeout_s + _DRAIN_MARGIN_S
    engines = [
        serve.deployment(
            name=name,
            max_ongoing_requests=model.engine_capacity + CONTROL_CALLS,
            graceful_shutdown_timeout_s=shutdown_s,
            request_router_config=router_config(model.routing, model.engine),
            health_check_period_s=args.health_check_period_s,
            health_check_timeout_s=args.health_check_timeout_s,
            ray_actor_options=model.engine_resources,
            **model.engine_placement,
            max_constructor_retry_count=_ANY_NUMBER if model.may_sleep else _STARTS * model.first_engines,
            **deployment_options(model),
        )(EngineReplica).bind(model, args.total_engines)
        for name, model in zip(args.engine_names, args.each_model(), strict=True)
    ]
    ingress = serve.deployment(
        name="Ingress",
        num_replicas=args.ingress_replicas,
        max_ongoing_requests=args.ingress_capacity + CONTROL_CALLS,
        graceful_shutdown_timeout_s=shutdown_s,
        ray_actor_options={"num_cpus": args.ingress_num_cpus},
        max_constructor_retry_count=_STARTS * args.ingress_replicas,
    )(serve.ingress()(IngressReplica))
    return ingress.bind(args, engines, _shared_store(args) if args.shares_responses else None)


def _shared_store(args: AppSettings) -> Application:
    """In one process, which holds nothing back at its end: what it keeps is gone then."""
    store = serve.deployment(
        name="ResponsesStore",
        num_replicas=1,
        max_ongoing_requests=args.ingress_replicas * args.ingress_capacity,
        graceful_shutdown_timeout_s=_STORE_SHUTDOWN_S,
        ray_actor_options={"num_cpus": 0},
        max_constructor_retry_count=_STARTS,
    )(StoreReplica)
    return store.bind(args.responses_store)
