# cupyattn where there is a CUDA device:
#   docker build --tag cupyattn .
#   docker run --rm --gpus all cupyattn                 # make ladder
#   docker run --rm --gpus all cupyattn make test
# The driver of the host must be of CUDA 13; for one of CUDA 12 build with
#   --build-arg CUDA=12.9.1 --build-arg EXTRA=cuda12
ARG CUDA=13.0.1
FROM nvidia/cuda:${CUDA}-runtime-ubuntu24.04

RUN apt-get update \
    && apt-get install --yes --no-install-recommends make python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home cupyattn \
    && install --directory --owner=cupyattn --group=cupyattn /opt/cupyattn
USER cupyattn
WORKDIR /opt/cupyattn

# CuPy, NVRTC and its headers: an extra of setup.cfg, which make takes from here.
ARG EXTRA=cuda13
ENV EXTRA=${EXTRA}
COPY --chown=cupyattn:cupyattn . .
RUN make setup

ENV PATH=/opt/cupyattn/.venv/bin:${PATH}
CMD ["make", "ladder"]
