// Search runs in a worker. Browsers refuse workers to pages that were opened from disk, so there an iframe takes the
// worker's place. Served pages keep the browser's own Worker.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc =
        "<script>window.postMessage = data => parent.postMessage({ worker: data }, '*')</script>" +
        `<script src="${url}"></script>`;
      this.ready = new Promise(done => { this.frame.onload = done; });
      window.addEventListener("message", event => {
        if (event.source === this.frame.contentWindow && "worker" in Object(event.data)) {
          event.stopImmediatePropagation();
          this.dispatchEvent(new MessageEvent("message", { data: event.data.worker }));
        }
      });
      document.body.appendChild(this.frame);
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
