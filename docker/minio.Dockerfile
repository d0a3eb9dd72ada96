# MinIO from source: its binaries and images are no longer published. The build takes about 5 minutes.

FROM golang:1.24-alpine AS build
RUN CGO_ENABLED=0 go install github.com/minio/minio@v0.0.0-20260212201848-7aac2a2c5b7c

FROM alpine:3.22
COPY --from=build /go/bin/minio /usr/local/bin/minio
RUN adduser -D -u 1000 minio && install -d -o minio /data
USER 1000
VOLUME /data
EXPOSE 9000
HEALTHCHECK --interval=2s --timeout=2s --retries=30 \
    CMD ["wget", "-q", "-O", "/dev/null", "http://127.0.0.1:9000/minio/health/live"]
ENTRYPOINT ["minio"]
CMD ["server", "--address", ":9000", "/data"]
