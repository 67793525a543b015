{{/*
A group of workers. Takes `root`, `spot` (whether the nodes may be taken away), and the group's `name`, `replicas`,
`minReplicas`, `maxReplicas`, `priority`, `nodeSelector` and `tolerations`.
*/}}
{{- define "chunkserve.worker" -}}
{{- $values := .root.Values }}
{{- $engines := $values.engines }}
groupName: {{ .name }}
replicas: {{ .replicas }}
minReplicas: {{ .minReplicas }}
maxReplicas: {{ .maxReplicas }}
priority: {{ .priority }}
{{- if $values.spot.enabled }}
labels: {ray.io/market-type: {{ ternary "spot" "on-demand" .spot }}}
{{- end }}
rayStartParams:
  num-cpus: {{ $engines.cpus | quote }}
  {{- if $engines.gpus }}
  num-gpus: {{ $engines.gpus | quote }}
  {{- end }}
template:
  metadata:
    labels:
      chunkserve/app: chunkserve
      chunkserve/role: {{ .name }}
      chunkserve/node: worker
    {{- if and $values.kvDisk.enabled $values.kvDisk.keySecretName }}
    annotations:
      chunkserve/made-by-hand: secret/{{ $values.kvDisk.keySecretName }}
    {{- end }}
  spec:
    terminationGracePeriodSeconds: {{ $values.streams.gracePeriodSeconds }}
    automountServiceAccountToken: false
    {{- with $values.imagePullSecrets }}
    imagePullSecrets: {{ toJson . }}
    {{- end }}
    {{- if .spot }}
    # Nobody ever sets this condition, so the pod is never Ready and never behind the Service: a stream through a spot
    # node's proxy would end with the node.
    readinessGates: [{conditionType: chunkserve/takes-clients}]
    {{- end }}
    {{- with .nodeSelector }}
    nodeSelector: {{ toYaml . | nindent 6 }}
    {{- end }}
    securityContext: {{ include "chunkserve.podSecurity" .root | nindent 6 }}
    {{- if or $engines.gpus .tolerations }}
    tolerations:
      {{- if $engines.gpus }}
      - {key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}
      {{- end }}
      {{- with .tolerations }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- end }}
    {{- if not .spot }}
    topologySpreadConstraints:
      - maxSkew: 1
        topologyKey: kubernetes.io/hostname
        whenUnsatisfiable: ScheduleAnyway
        labelSelector:
          matchLabels: {chunkserve/app: chunkserve, chunkserve/role: {{ .name }}}
    {{- end }}
    initContainers:
      # An engine that starts before its weights are present fails, and Serve gives up after some tries.
      {{- range $number, $model := include "chunkserve.models" .root | fromJsonArray }}
      - name: await-model{{ if $number }}-{{ $number }}{{ end }}
        image: {{ include "chunkserve.image" $.root }}
        command:
          - bash
          - -c
          - until python -m engine.checkpoints.prepare{{ if include "chunkserve.bothForms" $.root | fromJsonArray | has $model }} --quantize both{{ end }} "$0" >/dev/null; do sleep 5; done
          - {{ $model | quote }}
        env:
          {{- include "chunkserve.cacheEnv" $.root | nindent 10 }}
          - {name: HF_HUB_OFFLINE, value: "1"}
        resources:
          requests: {cpu: "1", memory: 2Gi}
          limits: {memory: 2Gi}
        securityContext: {{ include "chunkserve.containerSecurity" $.root | nindent 10 }}
        volumeMounts:
          - {name: models, mountPath: /models, readOnly: true}
      {{- end }}
    containers:
      - name: ray-worker
        image: {{ include "chunkserve.image" .root }}
        env: {{ include "chunkserve.env" .root | nindent 10 }}
        ports:
          - {name: serve, containerPort: 8000}
          - {name: metrics, containerPort: 8080}
          - {name: haproxy-metrics, containerPort: 9101}
        readinessProbe:
          httpGet: {path: /-/healthz, port: serve}
          periodSeconds: 5
          timeoutSeconds: 3
          failureThreshold: 3
        lifecycle:
          preStop:
            exec:
              command: [python, -m, k8s.drain, --deadline-s, {{ $values.streams.drainDeadlineSeconds | quote }}, --log, /proc/1/fd/1]
        resources:
          requests:
            cpu: {{ $engines.cpus | quote }}
            memory: {{ $engines.memory }}
            {{- if $engines.gpus }}
            nvidia.com/gpu: {{ $engines.gpus | quote }}
            {{- end }}
            {{- if and $values.kvDisk.enabled (not $values.kvDisk.hostPath) (not $values.kvDisk.storageClassName) }}
            ephemeral-storage: {{ $values.kvDisk.ephemeralStorage }}
            {{- end }}
          limits: # no CPU limit: a throttled step loop stalls every stream
            memory: {{ $engines.memory }}
            {{- if $engines.gpus }}
            nvidia.com/gpu: {{ $engines.gpus | quote }}
            {{- end }}
        securityContext: {{ include "chunkserve.containerSecurity" .root | nindent 10 }}
        volumeMounts:
          - {name: models, mountPath: /models, readOnly: true}
          - {name: ray-logs, mountPath: /tmp/ray}
          {{- if and $values.apiKeys.secretName (not .spot) }}
          - {name: api-keys, mountPath: /etc/chunkserve, readOnly: true}
          {{- end }}
          {{- if $values.kvDisk.enabled }}
          - {name: kv, mountPath: /var/cache/chunkserve}
          {{- if $values.kvDisk.keySecretName }}
          - {name: kv-key, mountPath: /etc/chunkserve-kv, readOnly: true}
          {{- end }}
          {{- end }}
    volumes:
      - name: models
        persistentVolumeClaim: {claimName: model-cache, readOnly: true}
      - name: ray-logs
        emptyDir: {sizeLimit: 20Gi}
      {{- if and $values.apiKeys.secretName (not .spot) }}
      - name: api-keys
        secret: {secretName: {{ $values.apiKeys.secretName | quote }}}
      {{- end }}
      {{- if $values.kvDisk.enabled }}
      - name: kv
        {{- if $values.kvDisk.hostPath }}
        hostPath: {path: {{ $values.kvDisk.hostPath | quote }}, type: Directory}
        {{- else if $values.kvDisk.storageClassName }}
        ephemeral:
          volumeClaimTemplate:
            spec:
              accessModes: [ReadWriteOnce]
              storageClassName: {{ $values.kvDisk.storageClassName | quote }}
              resources:
                requests:
                  storage: {{ $values.kvDisk.size }}
        {{- else }}
        emptyDir: {sizeLimit: {{ $values.kvDisk.size }}}
        {{- end }}
      {{- if $values.kvDisk.keySecretName }}
      - name: kv-key
        secret: {secretName: {{ $values.kvDisk.keySecretName | quote }}, defaultMode: 288} # 0440, for the group of fsGroup
      {{- end }}
      {{- end }}
{{- end }}
