{{/* What several objects have in common. ../../README.md says why each number is what it is. */}}

{{/* Removes what is null in a map. Helm does so only with what values.yaml has, and not with what other files have. */}}
{{- define "chunkserve.withoutNulls" -}}
{{- range $key, $value := . }}
{{- if kindIs "invalid" $value }}
{{- $_ := unset $ $key }}
{{- else if kindIs "map" $value }}
{{- include "chunkserve.withoutNulls" $value }}
{{- else if kindIs "slice" $value }}
{{- range $value }}{{ if kindIs "map" . }}{{ include "chunkserve.withoutNulls" . }}{{ end }}{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "chunkserve.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "chunkserve.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "chunkserve.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end }}

{{- define "chunkserve.cacheEnv" -}}
- {name: CHUNKSERVE_CACHE, value: /models/chunkserve}
- {name: HF_HOME, value: /models/huggingface}
{{- end }}

{{/* The environment of Ray's containers. `env` replaces values of the first list: a name may be there only once. */}}
{{- define "chunkserve.env" -}}
{{- $given := .Values.env }}
{{- $stall := dig "client_stall_timeout_s" 60 .Values.args | ceil | int }}
{{- range list
  (list "RAY_SERVE_ENABLE_HA_PROXY" "1")
  (list "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S" (max 3600 .Values.streams.drainDeadlineSeconds | toString))
  (list "RAY_SERVE_HAPROXY_MAXCONN" "8192")
  (list "RAY_SERVE_HAPROXY_BINARY_PATH" "/opt/venv/bin/chunkserve-haproxy")
  (list "RAY_SERVE_HAPROXY_METRICS_PORT" "9101")
  (list "RAY_SERVE_HAPROXY_RETRY_ON" "conn-failure empty-response")
  (list "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S" (toString $stall))
  (list "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH" "serve_app.edge.http_server:guard_ours")
  (list "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S" "5")
  (list "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS" "1")
  (list "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT" "1000000")
  (list "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD" "0")
  (list "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP" "0")
  (list "RAY_SERVE_CONTROL_LOOP_INTERVAL_S" "0.3")
  (list "RAY_worker_niceness" "0")
  (list "RAY_worker_killing_policy_by_group" "true")
  (list "RAY_USAGE_STATS_ENABLED" "0") }}
- {name: {{ first . }}, value: {{ dig (first .) (last .) $given | quote }}}
{{- $given = omit $given (first .) }}
{{- end }}
{{ include "chunkserve.cacheEnv" . }}
- {name: HF_HUB_OFFLINE, value: "1"}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- if and .Values.inferenceGateway.enabled (not (hasKey $given "CHUNKSERVE_MAX_CONNECTIONS_PER_SOURCE")) }}
# All connections come from the gateway's few addresses, and it limits clients.
- {name: CHUNKSERVE_MAX_CONNECTIONS_PER_SOURCE, value: "0"}
{{- end }}
{{- range $name, $value := $given }}
- {name: {{ $name | quote }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{/* The models that are downloaded and served: that of `args`, or those of `args.models`, with their drafts', each once. */}}
{{- define "chunkserve.models" -}}
{{- $models := list }}
{{- range .Values.args.models | default (list .Values.args) }}
{{- $models = append $models (.model | default "smollm2-135m-instruct") }}
{{- with dig "engine" "speculative" "model" "" . }}{{ $models = append $models . }}{{ end }}
{{- end }}
{{- $models | uniq | toJson }}
{{- end }}

{{/*
The models that are prepared in both forms that a GGUF file has: where engines take only one, and it need not be the one that
the Job's processor would choose. Other models have one form.
*/}}
{{- define "chunkserve.bothForms" -}}
{{- $both := list }}
{{- range .Values.args.models | default (list .Values.args) }}
{{- if or (ne (dig "engine" "quantize" "auto" .) "auto") (dig "engine" "batch_invariant" false .) }}
{{- range list (.model | default "smollm2-135m-instruct") (dig "engine" "speculative" "model" "" .) }}
{{- if or (eq . "smollm2-135m-instruct") (hasSuffix ".gguf" .) }}{{ $both = append $both . }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- $both | toJson }}
{{- end }}

{{/* The Serve config. As in every cluster of ours, an engine on a spot node is used only for its work. */}}
{{- define "chunkserve.serveConfig" -}}
{{- $args := .Values.args }}
{{- if $args.models }}{{ $args = omit $args "model" }}{{ end }}
{{- $application := dict "name" "chunkserve" "route_prefix" "/" "import_path" "serve_app.app:build" "args" $args }}
{{- if .Values.spot.enabled }}
{{- $onDemand := dict "ray.io/market-type" "on-demand" }}
{{- $ingress := dict "num_cpus" (dig "ingress_num_cpus" 0.25 $args) "label_selector" $onDemand }}
{{- $deployments := list (dict "name" "Ingress" "ray_actor_options" $ingress) }}
{{- /* There is a store only where several ingress replicas keep responses, and Serve refuses a deployment that is not there. */}}
{{- $kept := dig "responses_store" "max_mib" 64 $args }}
{{- if and (gt (dig "ingress_replicas" 1 $args | int) 1) (gt (mulf $kept 1048576 | int64) 0) }}
{{- $store := dict "num_cpus" 0 "label_selector" $onDemand }}
{{- $deployments = append $deployments (dict "name" "ResponsesStore" "ray_actor_options" $store) }}
{{- end }}
{{- $_ := set $application "deployments" $deployments }}
{{- end }}
{{- dict
  "proxy_location" "EveryNode"
  "http_options" (dict "host" "0.0.0.0" "port" 8000)
  "logging_config" (dict "enable_access_log" false)
  "applications" (list $application) | toYaml }}
{{- end }}

{{/* Values that a schema cannot compare with each other. Each refusal is one line: the value, its limit, what it is. */}}
{{- define "chunkserve.check" -}}
{{- $streams := .Values.streams }}
{{- $drain := .Values.args.drain_timeout_s | default 120 }}
{{- $drained := add (ceil $drain) 15 | int }}
{{- $deadline := $streams.drainDeadlineSeconds | int }}
{{- if lt (float64 $drain) (float64 $streams.longestSeconds) }}
{{- fail (printf "args.drain_timeout_s must be >= streams.longestSeconds (%v), but it is %v" $streams.longestSeconds $drain) }}
{{- end }}
{{- if lt $deadline $drained }}
{{- fail (printf "streams.drainDeadlineSeconds must be >= args.drain_timeout_s + 15 (%d), but it is %d" $drained $deadline) }}
{{- end }}
{{- if le ($streams.gracePeriodSeconds | int) $deadline }}
{{- fail (printf "streams.gracePeriodSeconds must be > streams.drainDeadlineSeconds (%d), but it is %v" $deadline $streams.gracePeriodSeconds) }}
{{- end }}
{{- if lt ($streams.clusterDeletionDelaySeconds | int) $deadline }}
{{- fail (printf "streams.clusterDeletionDelaySeconds must be >= streams.drainDeadlineSeconds (%d), but it is %v" $deadline $streams.clusterDeletionDelaySeconds) }}
{{- end }}
{{- range list "CHUNKSERVE_CACHE" "HF_HOME" "HF_HUB_OFFLINE" "POD_IP" }}
{{- if hasKey $.Values.env . }}
{{- fail (printf "env.%s must not be set: the chart says where the weights and the pod are" .) }}
{{- end }}
{{- end }}
{{- with pick .Values.env "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S" | values }}
{{- if lt (first . | int) $deadline }}
{{- fail (printf "env.RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S must be >= streams.drainDeadlineSeconds (%d), but it is %q" $deadline (first .)) }}
{{- end }}
{{- end }}
{{- if not (regexMatch "[1-9]" .Values.initializingTimeout) }}
{{- fail (printf "initializingTimeout must be above zero, but it is %s" .Values.initializingTimeout) }}
{{- end }}
{{- if and .Values.monitoring.enabled .Values.incrementalUpgrade.enabled (not .Values.monitoring.target) }}
{{- fail "monitoring.target must be the Gateway's host:port with incrementalUpgrade.enabled, where each cluster has a Service of its own, but it is empty" }}
{{- end }}
{{- $keys := dig "auth" "keys_file" "" .Values.args | default "" }}
{{- with .Values.apiKeys.secretName }}
{{- if not (hasPrefix "/etc/chunkserve/" $keys) }}
{{- fail (printf "args.auth.keys_file must be in /etc/chunkserve, where apiKeys.secretName (%s) is mounted, but it is %q: nobody would read its keys" . $keys) }}
{{- end }}
{{- else }}
{{- if hasPrefix "/etc/chunkserve/" $keys }}
{{- fail (printf "args.auth.keys_file is %s, but apiKeys.secretName is empty: ingress replicas could not read it" $keys) }}
{{- end }}
{{- end }}
{{- if .Values.args.models }}
{{- range list "served_model_name" "default_sampling" "model_aliases" "lora_adapters" "allow_lora_updates" "engine" "engine_replicas" "autoscaling" "engine_num_cpus" "engine_num_gpus" "tensor_parallel_placement" "engine_accelerator_type" "routing" "tool_parser" "reasoning_parser" "pooling" "images" }}
{{- if hasKey $.Values.args . }}
{{- fail (printf "args.%s must not stand beside args.models: it is each model's own, and null removes what an earlier file says" .) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $number, $model := .Values.args.models | default (list .Values.args) }}
{{- $place := ternary (printf "args.models.%d" $number) "args" (gt (len ($.Values.args.models | default list)) 0) }}
{{- include "chunkserve.checkTiers" (dict "disk" $.Values.kvDisk "place" (printf "%s.engine.kv_tiers" $place) "tiers" (dig "engine" "kv_tiers" dict $model)) }}
{{- end }}
{{- $reserved := list }}
{{- $workers := add .Values.engines.maxReplicas (ternary .Values.spot.maxReplicas 0 .Values.spot.enabled) }}
{{- range $number, $model := .Values.args.models | default (list .Values.args) }}
{{- $place := ternary (printf "args.models.%d" $number) "args" (gt (len ($.Values.args.models | default list)) 0) }}
{{- $ranks := 1 }}
{{- if ne (dig "tensor_parallel_placement" "strict_pack" $model) "strict_pack" }}
{{- $ranks = mul (dig "engine" "tensor_parallel_size" 1 $model) (dig "engine" "expert_parallel_size" 1 $model) }}
{{- end }}
{{- $reserved = append $reserved (dig "engine_num_gpus" 0 $model | float64) }}
{{- $parts := 1000000 }}
{{- range $setting, $of := dict "engine_num_cpus" (list "engines.cpus" $.Values.engines.cpus 0.5) "engine_num_gpus" (list "engines.gpus" $.Values.engines.gpus 0) }}
{{- $asked := divf (dig $setting (last $of) $model) $ranks }}
{{- if gt $asked (index $of 1 | float64) }}
{{- fail (printf "%s.%s must be <= %s (%v) on each node, but it is %v: no worker could hold an engine" $place $setting (first $of) (index $of 1) $asked) }}
{{- end }}
{{- if gt $asked 0.0 }}{{ $parts = min $parts (divf (index $of 1) $asked | floor | int) }}{{ end }}
{{- end }}
{{- $most := div (mul $workers $parts) $ranks }}
{{- $given := or (hasKey $model "engine_replicas") (not (hasKey $model "autoscaling")) }}
{{- $setting := ternary "engine_replicas" "autoscaling.min_replicas" $given }}
{{- $few := ternary (dig "engine_replicas" 1 $model) (dig "autoscaling" "min_replicas" 1 $model) $given }}
{{- if gt (int $few) (int $most) }}
{{- fail (printf "%s.%s is %v, but %d workers at most hold %d engines: the start would not end" $place $setting $few $workers $most) }}
{{- end }}
{{- end }}
{{- if and .Values.engines.gpus (not (without $reserved 0.0)) }}
{{- fail (printf "engines.gpus is %v, but no model has an engine_num_gpus: its engines would run on the CPU" .Values.engines.gpus) }}
{{- end }}
{{- if and .Values.kvDisk.hostPath .Values.kvDisk.storageClassName }}
{{- fail (printf "kvDisk.hostPath must be empty beside kvDisk.storageClassName (%s), but it is %s" .Values.kvDisk.storageClassName .Values.kvDisk.hostPath) }}
{{- end }}
{{- if lt (.Values.engines.maxReplicas | int) (.Values.engines.minReplicas | int) }}
{{- fail (printf "engines.maxReplicas must be >= engines.minReplicas (%v), but it is %v" .Values.engines.minReplicas .Values.engines.maxReplicas) }}
{{- end }}
{{- if gt (.Values.incrementalUpgrade.stepSizePercent | int) (.Values.incrementalUpgrade.maxSurgePercent | int) }}
{{- fail (printf "incrementalUpgrade.stepSizePercent must be <= incrementalUpgrade.maxSurgePercent (%v), but it is %v" .Values.incrementalUpgrade.maxSurgePercent .Values.incrementalUpgrade.stepSizePercent) }}
{{- end }}
{{- end }}

{{/* Refuses files of KV that engines could not write, or that are not encrypted although there is a key. Takes `disk`, `tiers`, `place`. */}}
{{- define "chunkserve.checkTiers" -}}
{{- $key := .tiers.disk_key_file | default "" }}
{{- $secret := .disk.keySecretName }}
{{- with .tiers.disk_path }}
{{- if not $.disk.enabled }}
{{- fail (printf "%s.disk_path is %v, but kvDisk.enabled is false: engines could not write there" $.place .) }}
{{- end }}
{{- if not (hasPrefix "/var/cache/chunkserve/" (clean .)) }}
{{- fail (printf "%s.disk_path must be a directory inside /var/cache/chunkserve, where kvDisk is mounted, but it is %v" $.place .) }}
{{- end }}
{{- if and $secret (not (hasPrefix "/etc/chunkserve-kv/" $key)) }}
{{- fail (printf "%s.disk_key_file must be in /etc/chunkserve-kv, where kvDisk.keySecretName (%s) is mounted, but it is %q: empty keySecretName for files that are not encrypted" $.place $secret $key) }}
{{- end }}
{{- if and (not $secret) (hasPrefix "/etc/chunkserve-kv/" $key) }}
{{- fail (printf "%s.disk_key_file is %v, but kvDisk.keySecretName is empty: engines could not read it" $.place $key) }}
{{- end }}
{{- end }}
{{- end }}
