{{- define "agl.name" -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{- end }}

{{- define "agl.labels" -}}
app.kubernetes.io/name: agl-otel
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "agl.image" -}}{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{- end }}

{{- define "agl.scheme" -}}{{ if .Values.secrets.tls }}https://{{ end }}{{- end }}

{{/* The pod of one service: root, component, module, ports {name: number}, advertise, env (a list as YAML), databases, probe, data (a volume's name). */}}
{{- define "agl.pod" -}}
{{- $root := .root }}
metadata:
  labels: {{- include "agl.labels" . | nindent 4 }}
spec:
  serviceAccountName: {{ .account | default (printf "%s-services" (include "agl.name" $root)) }}
  automountServiceAccountToken: {{ not (empty .account) }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: 90
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext: {{- toYaml $root.Values.podSecurityContext | nindent 4 }}
  {{- with $root.Values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $root.Values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector: {matchLabels: {{ include "agl.labels" . | fromYaml | toJson }}}
  containers:
    - name: {{ .component }}
      image: {{ include "agl.image" $root | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args: {{ concat (list .module) (.args | default list) | toJson }}
      securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
      env:
        - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
        - {name: POD_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
        - {name: AGL_TOKEN, valueFrom: {secretKeyRef: {name: {{ $root.Values.secrets.token }}, key: token}}}
        - {name: AGL_STORE, value: "{{ include "agl.scheme" $root }}{{ include "agl.name" $root }}-queue:4747"}
        - {name: AGL_LOG_FORMAT, value: json}
        {{- if .advertise }}
        - {name: AGL_ADVERTISE, value: {{ .advertise | quote }}}
        {{- end }}
        {{- if .databases }}
        - {name: AGL_CLICKHOUSE_URL, valueFrom: {secretKeyRef: {name: {{ $root.Values.secrets.databases }}, key: clickhouse-url}}}
        {{- end }}
        {{- if $root.Values.secrets.tls }}
        - {name: AGL_TLS_CERT, value: /etc/agl-otel/tls/tls.crt}
        - {name: AGL_TLS_KEY, value: /etc/agl-otel/tls/tls.key}
        - {name: AGL_TLS_CA, value: /etc/agl-otel/tls/ca.crt}
        {{- end }}
        {{- range $name, $value := $root.Values.settings }}
        - {name: {{ $name }}, value: {{ $value | quote }}}
        {{- end }}
        {{- with .env }}
        {{- . | nindent 8 }}
        {{- end }}
      {{- with .ports }}
      ports:
        {{- range $name, $number := . }}
        - {name: {{ $name }}, containerPort: {{ $number }}}
        {{- end }}
      {{- end }}
      {{- with .probe }}
      startupProbe: {{- merge (dict "periodSeconds" 2 "failureThreshold" 60 "timeoutSeconds" 3) . | toYaml | nindent 8 }}
      readinessProbe: {{- merge (dict "periodSeconds" 5 "timeoutSeconds" 3) . | toYaml | nindent 8 }}
      livenessProbe: {{- merge (dict "periodSeconds" 10 "failureThreshold" 6 "timeoutSeconds" 5) . | toYaml | nindent 8 }}
      {{- end }}
      resources: {{- toYaml (index $root.Values .component).resources | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: {{ .data | default "data" }}, mountPath: /var/lib/agl-otel}
        {{- if $root.Values.secrets.tls }}
        - {name: tls, mountPath: /etc/agl-otel/tls, readOnly: true}
        {{- end }}
  volumes:
    - {name: tmp, emptyDir: {}}
    {{- if not .data }}
    - {name: data, emptyDir: {}}
    {{- end }}
    {{- if $root.Values.secrets.tls }}
    - {name: tls, secret: {secretName: {{ $root.Values.secrets.tls }}}}
    {{- end }}
{{- end }}

{{/* A probe of /health: root, port. */}}
{{- define "agl.health" -}}
httpGet: {path: /health, port: {{ .port }}, scheme: {{ if .root.Values.secrets.tls }}HTTPS{{ else }}HTTP{{ end }}}
{{- end }}
