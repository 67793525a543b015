"""The comparison with vLLM and Ray Serve LLM: every server in turn on this machine, under the same loads.

`run` measures, `servers` starts what is compared, `comparison` says what the figures mean, and `chart` draws them.
`env.sh` installs the peers into an environment of their own, in which `ray_llm` runs.

Imports nothing of what it measures.
"""
