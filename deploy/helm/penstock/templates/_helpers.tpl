{{- define "penstock.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "penstock.selector" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "penstock.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{- /* gateway.yaml: the values' config, and what follows from the rest of the values. */ -}}
{{- define "penstock.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- $own := dict "version" 1 -}}
{{- $_ := set $own "listeners" (dict "api" (dict "host" "0.0.0.0" "port" (int .Values.ports.api)) "admin" (dict "host" "0.0.0.0" "port" (int .Values.ports.admin))) -}}
{{- if .Values.tls.secret -}}
{{- $pair := dict "certificate" "tls/tls.crt" "key" "tls/tls.key" -}}
{{- $client := ternary (dict "client_ca" "tls/client-ca.crt") dict (ne .Values.tls.clientCa "") -}}
{{- $_ := set $own.listeners.api "tls" (merge $client $pair) -}}
{{- if .Values.tls.admin -}}
{{- $_ := set $own.listeners.admin "tls" $pair -}}
{{- end -}}
{{- end -}}
{{- $_ := set $own "timeouts" (mergeOverwrite (default dict $config.timeouts) (dict "shutdown" (printf "%ds" (int .Values.drainSeconds)))) -}}
{{- $_ := set $own "reload" (mergeOverwrite (default dict $config.reload) (dict "state_dir" "/var/lib/penstock")) -}}
{{- $service := printf "%s-admin" (include "penstock.fullname" .) -}}
{{- $names := list $service (printf "%s.%s" $service .Release.Namespace) (printf "%s.%s.svc" $service .Release.Namespace) -}}
{{- $admin := default dict $config.admin -}}
{{- $_ := set $admin "hosts" (concat $names (default list $admin.hosts) | uniq) -}}
{{- if .Values.secrets.adminKey -}}
{{- $_ := set $admin "key" (printf "${file:secrets/%s}" .Values.secrets.adminKey) -}}
{{- end -}}
{{- $_ := set $own "admin" $admin -}}
{{- toYaml (mergeOverwrite $config $own) -}}
{{- end -}}

{{- /* "s" where a listener has TLS: http{{ include "penstock.apiTls" . }}:// */ -}}
{{- define "penstock.apiTls" -}}{{ if .Values.tls.secret }}s{{ end }}{{- end -}}
{{- define "penstock.adminTls" -}}{{ if and .Values.tls.secret .Values.tls.admin }}s{{ end }}{{- end -}}

{{- /* What a gateway takes over only by a restart: a change of it rolls the pods, any other change does not. */ -}}
{{- define "penstock.restarts" -}}
{{- $config := fromYaml (include "penstock.config" .) -}}
{{- $log := pick (default dict $config.observability) "access_log" "access_flush" "access_blocks" "access_rotate" "log" -}}
{{- $batch := pick (default dict $config.batch) "dir" "s3" "lease" -}}
{{- $rest := pick $config "listeners" "prefix" "shared" "workers" -}}
{{- dict "observability" $log "batch" $batch | mergeOverwrite $rest | toJson | sha256sum -}}
{{- end -}}

{{- /* The namespaces of the Services whose endpoints are discovered, as a list; `config` may name none. */ -}}
{{- define "penstock.discovered" -}}
{{- $found := list -}}
{{- range .Values.config.pools -}}
{{- $where := (default dict (default dict .).discover).kubernetes -}}
{{- if $where -}}
{{- $found = append $found (default $.Release.Namespace $where.namespace) -}}
{{- end -}}
{{- end -}}
{{- $found | uniq | sortAlpha | toJson -}}
{{- end -}}

{{- /* Whole seconds, rounded up, of a duration as gateway.yaml writes it: 250ms, 1m30s. Nothing: 0. */ -}}
{{- define "penstock.seconds" -}}
{{- $units := dict "us" 0.000001 "ms" 0.001 "s" 1.0 "m" 60.0 "h" 3600.0 "d" 86400.0 -}}
{{- $total := 0.0 -}}
{{- range regexFindAll "[0-9.]+(us|ms|s|m|h|d)" (default "" .) -1 -}}
{{- $unit := regexFind "[a-z]+" . -}}
{{- $total = addf $total (mulf (float64 (trimSuffix $unit .)) (get $units $unit)) -}}
{{- end -}}
{{- ceil $total | int -}}
{{- end -}}

{{- /* How long a pod may take to end: every wait of its drain, one after the other, and 30 s for the rest. */ -}}
{{- define "penstock.graceSeconds" -}}
{{- $noticed := include "penstock.seconds" (default dict .Values.config.timeouts).grace -}}
{{- add .Values.preStopSeconds (int $noticed) .Values.drainSeconds 30 -}}
{{- end -}}

{{- /* What a pod asks for: as much for every worker, something for their supervisor, and what values say themselves. */ -}}
{{- define "penstock.resources" -}}
{{- $workers := int (default 1 .Values.config.workers) -}}
{{- $each := .Values.resourcesPerWorker -}}
{{- $supervisor := ternary .Values.supervisorMemoryMi 0 (gt $workers 1) -}}
{{- $requested := add (mul $workers $each.memoryRequestMi) $supervisor -}}
{{- $limit := add (mul $workers $each.memoryLimitMi) $supervisor -}}
{{- $cpu := printf "%dm" (mul $workers $each.cpuMillis) -}}
{{- $own := dict "requests" (dict "cpu" $cpu "memory" (printf "%dMi" $requested)) "limits" (dict "memory" (printf "%dMi" $limit)) -}}
{{- toYaml (mergeOverwrite $own (deepCopy .Values.resources)) -}}
{{- end -}}
