(function () {
  async function open() {
    const packed = Uint8Array.from(atob(document.getElementById("holdfast-data").textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const data = JSON.parse(await new Response(stream).text());
    const line = document.createElement("p");
    line.textContent = data.sentence;
    document.getElementById("page").append(line);
  }
  open();
})();
