{{- define "halimede.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 46 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 46 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "halimede.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "halimede.name" .) }}
{{- end }}

{{- define "halimede.selector" -}}
app.kubernetes.io/name: halimede-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "halimede.labels" -}}
{{ include "halimede.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: halimede
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* An image: (list of the root, its values, what stands behind an empty tag) */}}
{{- define "halimede.image" -}}
{{- $root := index . 0 }}{{ $image := index . 1 -}}
{{ $image.repository }}{{ if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default (printf "%s%s" $root.Chart.AppVersion (index . 2)) }}{{ end }}
{{- end }}

{{/* Spreads several replicas over nodes and zones where that is possible: (list of the replicas, their selector) */}}
{{- define "halimede.spread" -}}
{{- $selector := index . 1 }}
{{- if gt (int (index . 0)) 1 -}}
topologySpreadConstraints:
{{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
- maxSkew: 1
  topologyKey: {{ . }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels: {{- $selector | nindent 6 }}
  # During an update pods of the old version do not count.
  matchLabelKeys: [pod-template-hash]
{{- end }}
{{- end }}
{{- end }}

{{/* What the operator may do with the objects of the namespaces that it watches. */}}
{{- define "halimede.rules" -}}
- apiGroups: [halimede.dev]
  resources: [inferencemodels, modelensembles]
  verbs: [get, list, watch]
- apiGroups: [halimede.dev]
  resources: [inferencemodels/status, modelensembles/status]
  verbs: [patch]
# So that children may keep their owner until they are gone (blockOwnerDeletion).
- apiGroups: [halimede.dev]
  resources: [inferencemodels/finalizers, modelensembles/finalizers]
  verbs: [update]
# Whether an operator of another release that has an object still runs.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [get]
- apiGroups: [""]
  resources: [configmaps, serviceaccounts, services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [replicasets]
  verbs: [list, watch, patch]
# Pods are created in dry runs only, before an update that takes old pods away. Annotations of pods are changed, so that
# kubelets read repaired Secrets at once. Whoever may create Deployments can choose what pods run anyway.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, create, patch]
- apiGroups: [""]
  resources: [events]
  verbs: [create, list]
# Why pods wait for a volume.
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get]
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [get, list, watch, create, patch, delete]
{{- if .Values.rbac.keda }}
- apiGroups: [keda.sh]
  resources: [scaledobjects]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if .Values.rbac.dra }}
- apiGroups: [resource.k8s.io]
  resources: [resourceclaimtemplates]
  verbs: [get, list, watch, create, patch, delete]
# Which devices pods were allocated.
- apiGroups: [resource.k8s.io]
  resources: [resourceclaims]
  verbs: [get]
{{- end }}
{{- end }}
