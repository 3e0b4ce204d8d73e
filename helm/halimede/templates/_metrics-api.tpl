{{- define "halimede.metricsApi.name" -}}
{{ include "halimede.name" . }}-metrics-api
{{- end }}

{{- define "halimede.metricsApi.selector" -}}
app.kubernetes.io/name: halimede-metrics-api
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "halimede.metricsApi.labels" -}}
{{ include "halimede.metricsApi.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: metrics-api
app.kubernetes.io/part-of: halimede
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* Prometheus' address: the given one, else that of the only Prometheus in the cluster. */}}
{{- define "halimede.prometheusUrl" -}}
{{- if .Values.prometheus.url -}}
{{ .Values.prometheus.url }}
{{- else -}}
  {{- $operated := list }}{{ $others := list }}
  {{- range $service := (lookup "v1" "Service" "" "").items }}
    {{- /* The operator for Prometheus makes a Service of this name beside each of its servers. */}}
    {{- if eq $service.metadata.name "prometheus-operated" }}
      {{- $operated = append $operated (printf "http://%s.%s.svc:9090" $service.metadata.name $service.metadata.namespace) }}
    {{- else if and (eq (get ($service.metadata.labels | default dict) "app.kubernetes.io/name") "prometheus") (ne ($service.spec.clusterIP | default "") "None") }}
      {{- range $port := $service.spec.ports }}
        {{- if has ($port.name | default "") (list "http" "http-web" "web") }}
          {{- $others = append $others (printf "http://%s.%s.svc:%d" $service.metadata.name $service.metadata.namespace (int $port.port)) }}
        {{- end }}
      {{- end }}
    {{- end }}
  {{- end }}
  {{- $found := $operated | default $others }}
  {{- if eq (len $found) 1 }}{{ first $found }}{{ end }}
{{- end }}
{{- end }}

{{/* Why the release has no metrics API; empty: it has one. Only `helm template` and dry runs cannot look into the cluster. */}}
{{- define "halimede.metricsApi.absence" -}}
{{- $wanted := .Values.metricsApi.enabled }}
{{- $own := printf "%s/%s" .Release.Namespace (include "halimede.metricsApi.name" .) }}
{{- if eq $wanted "Never" -}}
metricsApi.enabled is Never
{{- else if .Values.watchNamespaces -}}
  {{- if eq $wanted "Always" }}{{ fail "metricsApi.enabled: Always needs cluster-wide rights, which a release with watchNamespaces does not have" }}{{ end -}}
the release is for some namespaces, and the metrics API is the cluster's
{{- else if eq $wanted "Always" -}}
  {{- if not (include "halimede.prometheusUrl" .) }}{{ fail "metricsApi.enabled: Always needs prometheus.url" }}{{ end -}}
{{- else if not (lookup "v1" "Namespace" "" "kube-system") -}}
the chart was rendered without a cluster, where metricsApi.enabled: Auto means Never
{{- else -}}
  {{- $other := "" }}
  {{- range list "v1beta1" "v1beta2" }}
    {{- with (lookup "apiregistration.k8s.io/v1" "APIService" "" (printf "%s.custom.metrics.k8s.io" .)).spec }}
      {{- with .service }}
        {{- $service := printf "%s/%s" .namespace .name }}
        {{- if ne $service $own }}{{ $other = $service }}{{ end }}
      {{- end }}
    {{- end }}
  {{- end }}
  {{- if $other -}}
custom.metrics.k8s.io is served by the Service {{ $other }}: give it the rules, see metricsApi.adapterRulesNamespace
  {{- else if not (include "halimede.prometheusUrl" .) -}}
there is no Prometheus, or more than one: set prometheus.url
  {{- end }}
{{- end }}
{{- end }}
