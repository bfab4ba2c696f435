// Browsers refuse to start a worker from a file:// page, so the search runs in a hidden frame there.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        this.onmessage?.(event);
      };
      inside.importScripts = (...urls) => urls.reduce((done, each) => done.then(() => load(each)), Promise.resolve());
      const load = (each) =>
        new Promise((resolve, reject) => {
          const script = inside.document.createElement("script");
          script.src = each;
          script.onload = resolve;
          script.onerror = reject;
          inside.document.body.append(script);
        });
      this.inside = inside;
      this.ready = load(new URL(url, location));
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.inside.frameElement.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
