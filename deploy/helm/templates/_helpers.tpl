{{/* Image and module of each role, and the volumes that it mounts. */}}
{{- define "relaxd.table" -}}
coordinator: {image: coordinator, volumes: [runs, models]}
trainer: {image: trainer, volumes: [runs, models]}
ranks: {image: trainer, module: services.trainer.ranks, volumes: [runs, models]}
rollout: {image: rollout, volumes: [models]}
reward: {image: reward, volumes: []}
advantage: {image: advantage, volumes: []}
reference: {image: trainer, module: services.trainer.reference, volumes: [runs, models]}
teacher: {image: trainer, module: services.trainer.teacher, volumes: [models]}
critic: {image: trainer, module: services.trainer.critic, volumes: [runs, models]}
judge: {image: rollout, module: services.rollout.judge, volumes: [models]}
agent: {image: agent, volumes: [models]}
launcher: {image: launcher, volumes: []}
cli: {image: cli, volumes: [runs, models]}
{{- end }}

{{- define "relaxd.labels" -}}
app.kubernetes.io/name: relaxd
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Labels of a role's workload and pods, by (dict "root" . "role" NAME), and its own ones of "settings" SETTINGS. */}}
{{- define "relaxd.podLabels" -}}
{{ include "relaxd.labels" .root }}
relaxd.dev/role: {{ .role }}
{{- with (.settings | default dict).labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "relaxd.secret" -}}
{{ .Values.secret | default (printf "%s-secrets" .Release.Name) }}
{{- end }}

{{- define "relaxd.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "relaxd.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- with .Values.portRange }}
sysctls: [{name: net.ipv4.ip_local_port_range, value: {{ replace "-" " " . | quote }}}]
{{- end }}
{{- end }}

{{/* A role's secrets: its own token (the launcher, which calls no other service, has none), whose tokens it accepts, and
the password of Redis. */}}
{{- define "relaxd.secretVolume" -}}
- name: secrets
  secret:
    secretName: {{ include "relaxd.secret" .root }}
    defaultMode: 0440
    items:
      {{- if ne .role "launcher" }}
      - {key: {{ .token }}.token, path: token}
      {{- end }}
      {{- if ne .role "cli" }}
      - {key: tokens, path: tokens}
      - {key: redis_password, path: redis_password}
      {{- end }}
{{- end }}

{{/* The pod of a role, by (dict "root" . "role" NAME "settings" SETTINGS). */}}
{{- define "relaxd.pod" -}}
{{- $table := include "relaxd.table" . | fromYaml }}
{{- $row := get $table .role }}
{{- $values := .root.Values }}
{{- $port := ternary 50050 50051 (eq .role "coordinator") }}
{{- $cli := eq .role "cli" }}
{{- $launcher := eq .role "launcher" }}
metadata:
  labels: {{- include "relaxd.podLabels" . | nindent 4 }}
spec:
  {{- if $launcher }}
  serviceAccountName: {{ .root.Release.Name }}-launcher
  {{- end }}
  automountServiceAccountToken: {{ $launcher }}
  enableServiceLinks: false
  {{- with $values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  # 15 s more than the service takes to hand back its groups.
  terminationGracePeriodSeconds: {{ ternary 5 (add .settings.graceSeconds 15) $cli }}
  securityContext: {{- include "relaxd.podSecurity" .root | nindent 4 }}
  {{- with .settings.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  # A pod of a node that is gone is replaced after 30 s instead of 5 min.
  tolerations:
    - {key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, tolerationSeconds: 30}
    - {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: 30}
    {{- with .settings.tolerations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  containers:
    - name: {{ .role }}
      image: {{ $values.image.registry }}relaxd/{{ $row.image }}{{ if and .settings.gpus (has $row.image (list "trainer" "rollout")) }}-gpu{{ end }}:{{ $values.image.tag }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      {{- if $cli }}
      command: [sleep, infinity]
      {{- else if $row.module }}
      command: [python, -m, {{ $row.module }}]
      {{- end }}
      env:
        - {name: RELAXD_COORDINATOR, value: "{{ .root.Release.Name }}-coordinator:50050"}
        - {name: RELAXD_STACK, value: {{ printf "%s.%s" .root.Release.Namespace .root.Release.Name | trunc 64 | quote }}}
        {{- if $launcher }}
        - {name: RELAXD_PLATFORM, value: kubernetes}
        - {name: RELAXD_PROJECT, value: {{ .root.Release.Name | quote }}}
        {{- else }}
        - {name: RELAXD_TOKEN_FILE, value: /run/relaxd/token}
        {{- end }}
        - {name: HF_HOME, value: /models/.huggingface}
        - {name: HOME, value: {{ ternary "/home/relaxd" "/tmp" (gt (int .settings.gpus) 0) }}}
        {{- if not $cli }}
        - {name: RELAXD_TOKENS_FILE, value: /run/relaxd/tokens}
        - {name: RELAXD_REDIS, value: {{ $values.redis.url | default (printf "redis://%s-redis:6379/0" .root.Release.Name) | quote }}}
        - {name: RELAXD_REDIS_PASSWORD_FILE, value: /run/relaxd/redis_password}
        - {name: RELAXD_GRACE_SECONDS, value: {{ .settings.graceSeconds | quote }}}
        {{- if eq .role "coordinator" }}
        {{- if and $values.roles.launcher $values.roles.launcher.replicas }}
        - {name: RELAXD_LAUNCHER, value: "{{ .root.Release.Name }}-launcher:50051"}
        {{- end }}
        {{- if $values.keda.enabled }}
        - {name: RELAXD_KEDA_PORT, value: "50052"}
        {{- end }}
        {{- else if not $launcher }}
        # Kubernetes starts a pod's process again: by this name the coordinator knows that it will be back.
        - {name: RELAXD_INSTANCE, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
        - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
        - {name: RELAXD_ADVERTISE, value: "$(POD_IP):{{ $port }}"}
        {{- end }}
        {{- if $values.serviceMonitor.enabled }}
        - {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: "http://{{ .root.Release.Name }}-collector:4317"}
        {{- end }}
        {{- if .settings.gpus }}
        # SGLang sets it for its own process; with another value here, the first broadcast of weights fails.
        - {name: NCCL_CUMEM_ENABLE, value: "0"}
        # NVLink multicast can't be set up between containers.
        - {name: NCCL_NVLS_ENABLE, value: "0"}
        {{- end }}
        {{- end }}
        {{- with .settings.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if not $cli }}
      ports:
        - {name: grpc, containerPort: {{ $port }}}
        {{- if and (eq .role "coordinator") $values.keda.enabled }}
        - {name: keda, containerPort: 50052}
        {{- end }}
      # `liveness` also holds while it starts, drains or has no coordinator: only a process that doesn't answer is killed.
      startupProbe: {grpc: {port: {{ $port }}, service: liveness}, periodSeconds: 5, failureThreshold: 240}
      livenessProbe: {grpc: {port: {{ $port }}, service: liveness}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 6}
      readinessProbe: {grpc: {port: {{ $port }}}, periodSeconds: 5, timeoutSeconds: 3}
      {{- end }}
      securityContext:
        {{- if .settings.gpus }}
        {{- /* Engines and Megatron compile kernels into their packages' folders and the user's. */}}
        {{- omit (include "relaxd.containerSecurity" . | fromYaml) "readOnlyRootFilesystem" | toYaml | nindent 8 }}
        {{- else }}
        {{- include "relaxd.containerSecurity" . | nindent 8 }}
        {{- end }}
      {{- $limits := .settings.resources.limits | default dict }}
      {{- if .settings.gpus }}
      {{- $limits = merge (dict "nvidia.com/gpu" (.settings.gpus | toString)) $limits }}
      {{- end }}
      resources: {{- merge (dict "limits" $limits) .settings.resources | toYaml | nindent 8 }}
      volumeMounts:
        - {name: secrets, mountPath: /run/relaxd, readOnly: true}
        - {name: shm, mountPath: /dev/shm}
        - {name: tmp, mountPath: /tmp}
        {{- if has "runs" $row.volumes }}
        - {name: runs, mountPath: /work/runs}
        {{- end }}
        {{- if has "models" $row.volumes }}
        - {name: models, mountPath: /models}
        {{- end }}
  volumes:
    {{- include "relaxd.secretVolume" (dict "root" .root "role" .role "token" (ternary "admin" .role $cli)) | nindent 4 }}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ .settings.shm }}}}
    - {name: tmp, emptyDir: {}}
    {{- range $name := $row.volumes }}
    - {name: {{ $name }}, persistentVolumeClaim: {claimName: {{ (get $values.storage $name).claim | default (printf "%s-%s" $.root.Release.Name $name) }}}}
    {{- end }}
{{- end }}
