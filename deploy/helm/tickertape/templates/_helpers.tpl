{{- define "tickertape.name" -}}
{{- printf "%s" .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "tickertape.labels" -}}
app.kubernetes.io/name: tickertape
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "tickertape.common" -}}
{{ include "tickertape.labels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "tickertape.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{/* Engines with a GPU need the image with CUDA. */}}
{{- define "tickertape.engineImage" -}}
{{ include "tickertape.image" . }}{{ if .Values.engine.gpus }}-cuda{{ end }}
{{- end -}}

{{- define "tickertape.secret" -}}
{{ .Values.auth.existingSecret | default (include "tickertape.name" .) }}
{{- end -}}

{{- define "tickertape.mostEngines" -}}
{{- if .Values.engine.autoscaling.enabled }}{{ .Values.engine.autoscaling.maxReplicas }}{{ else }}{{ .Values.engine.replicas }}{{ end -}}
{{- end -}}

{{/* The addresses of all engines that there may be: pods of a StatefulSet have names. A gateway uses those that answer. */}}
{{- define "tickertape.engines" -}}
{{- $engines := list -}}
{{- range $number := until (int (include "tickertape.mostEngines" .)) -}}
{{- $engines = append $engines (printf "tcp://%s-engine-%d.%s-engine.%s.svc:5555" (include "tickertape.name" $) $number (include "tickertape.name" $) $.Release.Namespace) -}}
{{- end -}}
{{- join "," $engines -}}
{{- end -}}

{{/* Both kinds of pods run as the user of the image, which may read the mounted secret through its group. */}}
{{- define "tickertape.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "tickertape.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "tickertape.mounts" -}}
- {name: settings, mountPath: /etc/tickertape, readOnly: true}
- {name: secret, mountPath: /etc/tickertape-secret, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- end -}}

{{- define "tickertape.volumes" -}}
- name: settings
  configMap: {name: {{ include "tickertape.name" . }}}
- name: secret
  secret:
    secretName: {{ include "tickertape.secret" . }}
    items: [{key: fleet-secret, path: fleet-secret}]
    defaultMode: 0440
- name: tmp
  emptyDir: {sizeLimit: 256Mi}
{{- end -}}
