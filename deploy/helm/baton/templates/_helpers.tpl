{{- /* An image by its digest, or by a tag where it has none, as one that was loaded into kind. */ -}}
{{- define "baton.image" -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ required "images: give a digest or a tag" .tag }}{{ end }}
{{- end }}

{{- /* Variables of the environment, from a map. */ -}}
{{- define "baton.env" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}

{{- /* What is asked of the RDMA device plugin. */ -}}
{{- define "baton.rdma" -}}
{{- if .Values.rdma.enabled }}{{ dict .Values.rdma.resource 1 | toJson }}{{ else }}{}{{ end }}
{{- end }}

{{- /* Memory that a network card reads is locked (docs/adr/0032-what-checkov-may-find.md). */ -}}
{{- define "baton.capabilities" -}}
{{- if .Values.rdma.enabled }}{drop: [ALL], add: [IPC_LOCK]}{{ else }}{drop: [ALL]}{{ end }}
{{- end }}

{{- /* A Job cannot be changed: one of another image or model is another one. */ -}}
{{- define "baton.fetchModel" -}}
fetch-model-{{ printf "%s %s %s" (include "baton.image" .Values.images.baton) .Values.modelCache.model .Values.modelCache.revision | sha256sum | trunc 8 }}
{{- end }}

{{- /* The configuration, as an annotation of each pod that reads it: it changes with the pod, and never under it. */ -}}
{{- define "baton.config" -}}
baton.example.com/cluster.yaml: |
  {{- tpl (toYaml .Values.config) . | nindent 2 }}
{{- end }}

{{- define "baton.configVolume" -}}
downwardAPI: {items: [{path: cluster.yaml, fieldRef: {fieldPath: "metadata.annotations['baton.example.com/cluster.yaml']"}}]}
{{- end }}

{{- /* preStop 5 s, the drain, and room to say so. */ -}}
{{- define "baton.gracePeriod" -}}
{{ add (.Values.config.cluster.drain_timeout_s | default 60 | ceil | int64) 30 }}
{{- end }}
