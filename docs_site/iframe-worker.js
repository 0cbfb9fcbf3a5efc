// Browsers start no worker for a page that was opened from disk. There the search runs in a hidden frame instead.
// The name is what Material's offline plugin looks for before it would load one from elsewhere.
if (location.protocol === 'file:') {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.body.appendChild(document.createElement('iframe'))
      frame.hidden = true
      this.inside = frame.contentWindow
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent('message', { data }))
      this.inside.importScripts = (...urls) => Promise.all(urls.map(url => this.load(url)))
      this.ready = this.load(url)
    }

    load(url) {
      const script = this.inside.document.createElement('script')
      script.src = url
      return new Promise(resolve => {
        script.onload = resolve
        this.inside.document.body.append(script)
      })
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent('message', { data })))
    }
  }
}
