# Narrowboat on a CUDA card: docker build -t narrowboat . && docker run --gpus all -v "$PWD:/work" narrowboat train run.yaml
FROM nvidia/cuda:12.8.1-runtime-ubuntu24.04
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/narrowboat
ENV PATH=/opt/narrowboat/bin:$PATH
COPY constraints.txt pyproject.toml README.md LICENSE /source/
COPY src /source/src
RUN pip install --no-cache-dir --constraint /source/constraints.txt '/source[all]'
WORKDIR /work
ENTRYPOINT ["narrowboat"]
