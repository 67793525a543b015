"""The comparison with vLLM and Ray Serve LLM: every server in turn on this machine, under the same loads.

`run` measures, `servers` starts the servers, `comparison` evaluates the figures, and `chart` draws them. `env.sh`
installs the peers into their own environment, in which `ray_llm` runs.

Never imports a server that it measures.
"""
